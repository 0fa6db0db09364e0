/* How many threads compute while other workers of the machine compute, too: see seats.c. */

#ifndef PDSERVE_SEATS_H
#define PDSERVE_SEATS_H

#include <stdint.h>

/* Returns how many of these threads to compute with. One thread at a time calls this. */
int64_t pdserve_threads_beside_others(int64_t num_threads);

/* Lets other workers see that this one computes. */
void pdserve_beat(void);

#endif
