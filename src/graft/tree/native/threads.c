/* Worker threads that share the rows of a call. */

enum { MOST_THREADS = 8, ROWS_PER_THREAD = 4 };

/* A range of rows for one thread. It has its own copy of the Pool structure, over the same memory. */
typedef struct {
    Pool pool;
    int64_t start, stop; /* rows */
    const void *arguments;
    int64_t most; /* the most nodes that one of its rows got */
    int failed;
} Part;

typedef void Work(Part *part);

/* Threads are started at first use and never end. A forked process has none and starts its own. There is one caller at
   a time, since callers hold the GIL. Every free thread takes the next part. So does the caller, which therefore does
   not wait for a thread that is slow to wake.

   A round's calls follow each other closely, and waking a thread may take longer than a part of the work. So if there
   are cores to spare, an idle thread spins for a while before it sleeps, and so does the caller at the end. */
enum { CORES_TO_SPARE = 2 * MOST_THREADS, SPINS_PER_CHECK = 64 };
static const int64_t SPIN_NANOSECONDS = 200000; /* nanoseconds */

static struct {
    pthread_mutex_t lock;
    pthread_cond_t begun, done;
    pid_t process;
    int64_t limit, num_started;
    int64_t num_parts, next; /* parts of the current work, and the first one not taken yet */
    int64_t num_left;        /* parts not done yet */
    int64_t round;           /* grows with every call */
    int spins;
    Work *work;
    Part *parts;
} team = {.lock = PTHREAD_MUTEX_INITIALIZER, .begun = PTHREAD_COND_INITIALIZER, .done = PTHREAD_COND_INITIALIZER,
          .limit = 1};

/* Sets the number of cores to use, the caller's included. */
int graft_use_threads(int64_t count) {
    team.limit = count < 1 ? 1 : count < MOST_THREADS ? count : MOST_THREADS;
    __atomic_store_n(&team.spins, count >= CORES_TO_SPARE, __ATOMIC_RELAXED);
    return OK;
}

/* Spins for a while until the number is `value` or, if `until` is 0, until it is not. */
static void spin(const int64_t *number, int64_t value, int until) {
    struct timespec start, now;
    if (!__atomic_load_n(&team.spins, __ATOMIC_RELAXED)) return;
    clock_gettime(CLOCK_MONOTONIC, &start);
    do {
        for (int i = 0; i < SPINS_PER_CHECK; i++) {
            if ((__atomic_load_n(number, __ATOMIC_ACQUIRE) == value) == until) return;
#if defined(__x86_64__) || defined(__i386__)
            __builtin_ia32_pause();
#endif
        }
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while ((now.tv_sec - start.tv_sec) * INT64_C(1000000000) + now.tv_nsec - start.tv_nsec < SPIN_NANOSECONDS);
}

/* Does the next part. The caller holds the lock, before and after. */
static void do_part(void) {
    Work *work = team.work;
    Part *part = team.parts + team.next++;
    pthread_mutex_unlock(&team.lock);
    work(part);
    pthread_mutex_lock(&team.lock);
    if (__atomic_sub_fetch(&team.num_left, 1, __ATOMIC_RELEASE) == 0) pthread_cond_signal(&team.done);
}

static void *wait_for_work(void *nothing) {
    (void)nothing;
    pthread_mutex_lock(&team.lock);
    for (;;) {
        while (team.next == team.num_parts) {
            int64_t round = team.round;
            pthread_mutex_unlock(&team.lock);
            spin(&team.round, round, 0);
            pthread_mutex_lock(&team.lock);
            if (team.round == round) pthread_cond_wait(&team.begun, &team.lock);
        }
        do_part();
    }
    return NULL;
}

/* Starts threads until there are `count`, the caller's included. Returns how many there are. */
static int64_t start_threads(int64_t count) {
    sigset_t all, before;
    if (team.process != getpid()) {
        pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
        pthread_cond_t waiting = PTHREAD_COND_INITIALIZER;
        team.lock = lock;
        team.begun = team.done = waiting;
        team.process = getpid();
        team.num_started = team.num_parts = team.next = team.round = 0;
    }
    if (team.num_started + 1 >= count) return count;
    sigfillset(&all); /* signals must go to Python's own threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (team.num_started + 1 < count) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, wait_for_work, NULL)) break;
        pthread_detach(thread);
        team.num_started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return team.num_started + 1;
}

/* Does the work for all rows, in parts. Afterwards the pool's `deepest`, and `most` unless NULL, are the maxima over
   all parts. Of several failures, the one with the lowest rows is returned. */
static int share_work(Pool *pool, Work *work, const void *arguments, int64_t *most) {
    Part parts[MOST_THREADS];
    int64_t count = least(team.limit, pool->num_rows / (team.spins ? 1 : ROWS_PER_THREAD));
    count = count < 2 ? 1 : start_threads(count);
    for (int64_t p = 0; p < count; p++)
        parts[p] = (Part){*pool, pool->num_rows * p / count, pool->num_rows * (p + 1) / count, arguments, 0, OK};
    if (count > 1) {
        pthread_mutex_lock(&team.lock);
        team.work = work;
        team.parts = parts;
        team.num_parts = count;
        team.next = 0;
        __atomic_store_n(&team.num_left, count, __ATOMIC_RELAXED);
        __atomic_add_fetch(&team.round, 1, __ATOMIC_RELEASE);
        pthread_cond_broadcast(&team.begun);
        while (team.next < team.num_parts) do_part();
        pthread_mutex_unlock(&team.lock);
        spin(&team.num_left, 0, 1);
        pthread_mutex_lock(&team.lock);
        while (team.num_left > 0) pthread_cond_wait(&team.done, &team.lock);
        team.num_parts = team.next = 0;
        pthread_mutex_unlock(&team.lock);
    } else
        work(parts);
    int failed = OK;
    for (int64_t p = 0; p < count; p++) {
        if (!failed) failed = parts[p].failed;
        if (parts[p].pool.deepest > pool->deepest) pool->deepest = parts[p].pool.deepest;
        if (most != NULL && parts[p].most > *most) *most = parts[p].most;
    }
    return failed;
}
