/* The processors that a worker computes on while other workers of the machine compute, too: see seats.c. */

#ifndef PDSERVE_SEATS_H
#define PDSERVE_SEATS_H

#include <stdint.h>

/* Returns how many of the threads to compute with. OpenMP's thread i is then bound to OpenMP's place `*place` + i; the
 * caller has to bind other computing threads alike. */
int64_t pdserve_threads_beside_others(int64_t num_threads, int64_t *place);

/* Binds the calling thread to one of OpenMP's places, counted round, if there are any. */
void pdserve_bind(int64_t place);

/* Lets other workers see that this one computes. */
void pdserve_beat(void);

#endif
