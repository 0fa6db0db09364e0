"""On a real API server the tests have the account of the chart's operator pod, in whichever of its files that is."""

from kube_account import NAME, manifests


def test_the_account_comes_before_what_binds_it_and_is_bound_to_every_role() -> None:
    made = manifests("somewhere")
    kinds = [each["kind"] for each in made]
    assert (kinds[0], made[0]["metadata"]["name"]) == ("ServiceAccount", NAME)
    assert kinds.count("ServiceAccount") == 1
    assert kinds.count("Role") == kinds.count("RoleBinding") == 2  # of its own namespace, and of the nodes' leases
    assert kinds.count("ClusterRole") == kinds.count("ClusterRoleBinding") == 1
