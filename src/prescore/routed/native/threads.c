/* What library.py asks of every library before anything else is called. */
#include "threads.h"

#include <omp.h>
#include <pthread.h>

#ifndef PRESCORE_ABI
#error "PRESCORE_ABI is set by build.py"
#endif

static int forked = 0;

static void in_child(void) { forked = 1; }

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(0, 0, in_child); }

int prescore_threads(void) { return forked ? 1 : omp_get_max_threads(); }

/* Which signatures the functions of this library have. */
PRESCORE_EXPORT int prescore_native_abi(void) { return PRESCORE_ABI; }

/* From here on, regions begun by the calling thread use so many threads. torch's runtime and ours are one where both
 * are named alike, and then this changes nothing; some builds of torch bring one under a name of its own. */
PRESCORE_EXPORT void prescore_native_follow(int threads) {
    if (!forked && threads > 0 && omp_get_max_threads() != threads) omp_set_num_threads(threads);
}

/* The threads that a parallel region really gets. */
PRESCORE_EXPORT int prescore_native_threads(void) {
    int threads = 0;
#pragma omp parallel num_threads(prescore_threads())
    {
#pragma omp single
        threads = omp_get_num_threads();
    }
    return threads;
}
