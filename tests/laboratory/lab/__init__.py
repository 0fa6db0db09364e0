"""Measurements for those who change pdserve: in no wheel, beside the tests."""
