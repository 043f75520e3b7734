/* How many threads a parallel region may use. Every region says `num_threads(prescore_threads())`, because the pool
 * of OpenMP does not survive a fork: a child that asked it for threads would wait for ever. */
#ifndef PRESCORE_THREADS_H
#define PRESCORE_THREADS_H

#define PRESCORE_EXPORT __attribute__((visibility("default")))

int prescore_threads(void);

#endif
