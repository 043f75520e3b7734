/* What library.py asks of every library before anything else is called, and the threads of all regions. */
#include "threads.h"

#include <stddef.h>

#ifndef PRESCORE_ABI
#error "PRESCORE_ABI is set by build.py"
#endif

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <pthread.h>
#endif

static _Thread_local int torch_threads = 1;
static int forked = 0;

#if !defined(_WIN32)
static void in_child(void) { forked = 1; }

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(0, 0, in_child); }
#endif

int prescore_threads(void) { return forked ? 1 : torch_threads; }

/* Which signatures the functions of this library have. */
PRESCORE_EXPORT int prescore_native_abi(void) { return PRESCORE_ABI; }

/* What compiled this library, and whose threads it uses. */
PRESCORE_EXPORT const char *prescore_native_compiler(void) {
#if defined(__clang__)
    return __VERSION__ ", own threads";
#elif defined(_OPENMP)
    return "GCC " __VERSION__ ", OpenMP's threads";
#else
    return "GCC " __VERSION__ ", own threads";
#endif
}

/* From here on, regions of the calling thread use so many threads. */
PRESCORE_EXPORT void prescore_native_follow(int threads) { torch_threads = threads > 0 ? threads : 1; }

#if defined(_OPENMP)

void prescore_run(int64_t n, void (*work)(void *of, Jobs *jobs), void *of) {
    const int threads = n < prescore_threads() ? (int)n : prescore_threads();
    Jobs jobs = {0, n};
    if (threads <= 1) {
        work(of, &jobs);
        return;
    }
#pragma omp parallel num_threads(threads)
    work(of, &jobs);
}

#else

/* What a caller wants help with: `helpers` threads may still join it, `busy` have joined. */
typedef struct Region {
    struct Region *after;
    void (*work)(void *of, Jobs *jobs);
    void *of;
    Jobs jobs;
    int helpers, busy;
} Region;

/* All that follows is read and written under the lock. Helpers wait for `opened`, callers for `left`; both only grow in number. */
static Region *open_regions = NULL;
static int hired = 0, wanted = 0; /* helpers that exist, and those that all regions together asked for */
#if defined(_WIN32)
static SRWLOCK lock = SRWLOCK_INIT;
static CONDITION_VARIABLE opened = CONDITION_VARIABLE_INIT, left = CONDITION_VARIABLE_INIT;
static void take_lock(void) { AcquireSRWLockExclusive(&lock); }
static void leave_lock(void) { ReleaseSRWLockExclusive(&lock); }
static void wait_for(CONDITION_VARIABLE *what) { SleepConditionVariableSRW(what, &lock, INFINITE, 0); }
static void announce(CONDITION_VARIABLE *what) { WakeAllConditionVariable(what); }
#else
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t opened = PTHREAD_COND_INITIALIZER, left = PTHREAD_COND_INITIALIZER;
static void take_lock(void) { pthread_mutex_lock(&lock); }
static void leave_lock(void) { pthread_mutex_unlock(&lock); }
static void wait_for(pthread_cond_t *what) { pthread_cond_wait(what, &lock); }
static void announce(pthread_cond_t *what) { pthread_cond_broadcast(what); }
#endif

/* No helper may join a region any more. */
static void close_region(const Region *r) {
    Region **at = &open_regions;
    while (*at && *at != r) at = &(*at)->after;
    if (*at) *at = r->after;
}

/* What a helper does until the process ends. */
static void help(void) {
    take_lock();
    for (;;) {
        while (!open_regions) wait_for(&opened);
        Region *r = open_regions;
        r->busy++;
        if (!--r->helpers) close_region(r);
        leave_lock();
        r->work(r->of, &r->jobs);
        take_lock();
        r->busy--;
        announce(&left);
    }
}

#if defined(_WIN32)
static DWORD WINAPI start(void *of) {
    (void)of;
    help();
    return 0;
}
static int hire(void) {
    const HANDLE thread = CreateThread(NULL, 1 << 20, start, NULL, STACK_SIZE_PARAM_IS_A_RESERVATION, NULL);
    return thread && CloseHandle(thread);
}
#else
static void *start(void *of) {
    help();
    return of;
}
static int hire(void) {
    pthread_t thread;
    return !pthread_create(&thread, NULL, start, NULL) && !pthread_detach(thread);
}
#endif

/* Without helpers, because the system has no more threads to give, the caller does all jobs. A helper that comes late is not
 * waited for. */
void prescore_run(int64_t n, void (*work)(void *of, Jobs *jobs), void *of) {
    const int helpers = (n < prescore_threads() ? (int)n : prescore_threads()) - 1;
    Region r = {NULL, work, of, {0, n}, helpers, 0};
    if (helpers <= 0) {
        work(of, &r.jobs);
        return;
    }
    take_lock();
    wanted += helpers;
    while (hired < wanted && hire()) hired++;
    r.after = open_regions;
    open_regions = &r;
    announce(&opened);
    leave_lock();
    work(of, &r.jobs);
    take_lock();
    close_region(&r);
    while (r.busy) wait_for(&left);
    wanted -= helpers;
    leave_lock();
}

#endif

typedef struct {
    int wanted, here;
} Count;

/* Stay until all are here, or for about a second. */
static void arrive(void *of, Jobs *jobs) {
    Count *count = of;
    (void)jobs;
    __atomic_fetch_add(&count->here, 1, __ATOMIC_RELAXED);
    for (int i = 0; i < 1 << 30 && __atomic_load_n(&count->here, __ATOMIC_RELAXED) < count->wanted; i++) continue;
}

/* The threads that a region really gets. */
PRESCORE_EXPORT int prescore_native_threads(void) {
    Count count = {prescore_threads(), 0};
    prescore_run(count.wanted, arrive, &count);
    return count.here;
}
