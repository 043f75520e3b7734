/* Parallel regions. `prescore_run` is the only one: by OpenMP where the runtime is the one that torch uses, else by threads of
 * this library, which need nothing but the system. */
#ifndef PRESCORE_THREADS_H
#define PRESCORE_THREADS_H

#include <stdint.h>

#if defined(_WIN32)
#define PRESCORE_EXPORT __declspec(dllexport)
#else
#define PRESCORE_EXPORT __attribute__((visibility("default")))
#endif

/* Jobs of a region, from `next` to `stop`: each thread takes one after the other. */
typedef struct {
    int64_t next, stop;
} Jobs;

/* The next job; -1 = none is left. */
static inline int64_t next_job(Jobs *jobs) {
    const int64_t job = __atomic_fetch_add(&jobs->next, 1, __ATOMIC_RELAXED);
    return job < jobs->stop ? job : -1;
}

/* How many threads a region of the calling thread may use. 1 in the child of a fork: the threads of the parent are not there, and
 * who asked them for work would wait for ever. */
int prescore_threads(void);

/* Call `work(of, jobs)` in some threads, in this one too, until all have returned. There are no more threads than jobs. */
void prescore_run(int64_t jobs, void (*work)(void *of, Jobs *jobs), void *of);

#endif
