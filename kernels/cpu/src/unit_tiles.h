/* The matrix unit of a processor (Intel AMX): 8 registers of up to 16 rows of 64 bytes. */

#ifndef PDSERVE_UNIT_TILES_H
#define PDSERVE_UNIT_TILES_H

#include "vectors.h"

#define UNIT_ROWS 16
#define UNIT_INPUTS 32 /* of bfloat16, in a row */

/* Whether there is one and it is used; see products_bfloat16.c. */
int64_t pdserve_has_matrix_unit(void);

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define HAS_MATRIX_UNIT

/* Before the unit reads what was written here, or anywhere else: GCC does not see that it reads. */
INLINE void finish_writes(const void *here) { __asm__ volatile("" ::"r"(here) : "memory"); }

/* Gives each register so many rows, and zeros. */
INLINE void configure_tiles(const uint8_t rows[8]) {
    struct {
        uint8_t palette, start, unused[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } of = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        of.rows[i] = rows[i];
        of.row_bytes[i] = rows[i] ? 64 : 0;
    }
    finish_writes(&of);
    _tile_loadconfig(&of);
}

#endif

#endif
