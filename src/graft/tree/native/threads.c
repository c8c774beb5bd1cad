/* Threads that share the rows of a call. */

enum { MOST_THREADS = 8, ROWS_PER_THREAD = 4 };

/* Some of the rows, for one thread: it works on a pool of its own, with the same memory. */
typedef struct {
    Pool pool;
    int64_t start, stop; /* rows */
    const void *arguments;
    int64_t most; /* the most nodes that one of its rows got, where they differ */
    int failed;
} Part;

typedef void Work(Part *part);

/* Threads wait for work for ever; they are started when they are first needed, and again in a forked process, which
   has none. One caller at a time: they hold Python's lock. Whoever is free takes the next part, the caller too, so that
   it does not wait for a thread that is slow to wake.

   A round's calls come one soon after the other, and to wake a thread may take longer than a part of the work. So where
   there are cores to spare, a thread that has nothing to do looks out for work for a while before it sleeps, and the
   caller for the end of the others' parts. */
enum { CORES_TO_SPARE = 2 * MOST_THREADS, SPINS_PER_CHECK = 64 };
static const int64_t SPIN_NANOSECONDS = 200000; /* nanoseconds */

static struct {
    pthread_mutex_t lock;
    pthread_cond_t begun, done;
    pid_t process;
    int64_t limit, num_started;
    int64_t num_parts, next; /* of the work under way: how many there are, and the first that nobody has taken */
    int64_t num_left;        /* those not done yet */
    int64_t round;           /* grows with every work */
    int spins;
    Work *work;
    Part *parts;
} team = {.lock = PTHREAD_MUTEX_INITIALIZER, .begun = PTHREAD_COND_INITIALIZER, .done = PTHREAD_COND_INITIALIZER,
          .limit = 1};

/* How many cores there are for threads, the caller's included. */
int graft_use_threads(int64_t count) {
    team.limit = count < 1 ? 1 : count < MOST_THREADS ? count : MOST_THREADS;
    __atomic_store_n(&team.spins, count >= CORES_TO_SPARE, __ATOMIC_RELAXED);
    return OK;
}

/* Looks at a number for a while, until it is `value` or, if not `until`, until it is no longer. */
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

/* Does the next part. The lock is held before and after. */
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

/* Starts threads until there are `count`, the caller's included, and returns how many there are. */
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
    sigfillset(&all); /* signals are for the threads that Python knows */
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

/* Does the work for all rows, in parts. The pool's deepest node is then that of all parts, and `most`, unless NULL, the
   most of all. Of several failures the first row's counts. */
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
