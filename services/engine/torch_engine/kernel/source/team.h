/* A team of threads that computes one job together, and sleeps between two.
 *
 * A job is a sequence of phases that every member walks through; a phase is pieces that members take. What is waited for is work,
 * never a thread: a phase is over when all its pieces are done, whoever did them. So a member that has lost its core, or never
 * woke up, costs the others nothing but the piece in its hands; it finds the phases it missed done, and joins where they are. So
 * members may also be sent away and called back while a job runs.
 * Who must wait looks for some microseconds, because the others are nearly done, then sleeps.
 */
#ifndef HR_TEAM_H
#define HR_TEAM_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#define LOOKS 1000 /* at some 40 to 60 cycles each: 10-20 us */

#if defined(__x86_64__) || defined(__i386__)
#define relax() __builtin_ia32_pause()
#else
#define relax() ((void)0)
#endif

typedef struct team team;

typedef struct {
    team *of;
    int number;  /* 0: the caller */
    int phase;   /* where this member is */
    int holding; /* tasks of the piece it took last */
    int left;    /* went away in the midst of the job */
} member;

typedef struct {
    atomic_int taken, done; /* tasks of one phase */
} progress;

struct team {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t *thread;
    member *members;
    progress *phases; /* [max_phases] */
    int max_phases;
    int started; /* threads that exist, beside the caller */
    int inside;  /* members in the present job, beside the caller */
    int closing;
    unsigned jobs;
    atomic_int invited; /* members that may be in the present job, the caller included; 0: there is none */
    atomic_int sleeping;
    void (*job)(member *, void *);
    void *argument;
};

/* Adds what `m` holds to the tasks that are done, and wakes those who sleep until the phase is over. */
static void team_credit(member *m, int total) {
    team *t = m->of;
    int done = atomic_fetch_add(&t->phases[m->phase].done, m->holding) + m->holding;
    m->holding = 0;
    if (done < total || !atomic_load(&t->sleeping)) return;
    pthread_mutex_lock(&t->lock);
    pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&t->lock);
}

/* The next piece [first, end) of the phase's `total` tasks, the one before being done; 0 when nothing is left to take. */
static int team_take(member *m, int total, int piece, int *first, int *end) {
    if (m->holding) team_credit(m, total);
    *first = atomic_fetch_add(&m->of->phases[m->phase].taken, piece);
    if (*first >= total) return 0;
    *end = *first + piece < total ? *first + piece : total;
    m->holding = *end - *first;
    return 1;
}

/* Returns when all `total` tasks of the phase are done; the next one begins. */
static void team_finish(member *m, int total) {
    team *t = m->of;
    atomic_int *done = &t->phases[m->phase++].done;
    for (int i = 0; i < LOOKS; i++) {
        if (atomic_load(done) >= total) return;
        relax();
    }
    pthread_mutex_lock(&t->lock);
    atomic_fetch_add(&t->sleeping, 1);
    while (atomic_load(done) < total) pthread_cond_wait(&t->changed, &t->lock);
    atomic_fetch_sub(&t->sleeping, 1);
    pthread_mutex_unlock(&t->lock);
}

/* Members that may be in the present job; 1 for who is still inside when it is over. */
static inline int team_size(team *t) {
    int invited = atomic_load_explicit(&t->invited, memory_order_relaxed);
    return invited > 0 ? invited : 1;
}

/* Whether `m`, which holds nothing, must leave the job. Never the caller. */
static int team_leaves(member *m) {
    m->left = m->number > 0 && m->number >= atomic_load(&m->of->invited);
    return m->left;
}

static void *team_member(void *argument) {
    member *m = argument;
    team *t = m->of;
    unsigned seen = 0;
    pthread_mutex_lock(&t->lock);
    while (!t->closing) {
        if (t->jobs == seen || m->number >= t->invited) {
            pthread_cond_wait(&t->changed, &t->lock);
            continue;
        }
        seen = t->jobs;
        t->inside++;
        pthread_mutex_unlock(&t->lock);
        m->phase = m->left = 0;
        t->job(m, t->argument);
        pthread_mutex_lock(&t->lock);
        if (m->left) seen--; /* it may be called back */
        if (--t->inside == 0) pthread_cond_broadcast(&t->changed);
    }
    pthread_mutex_unlock(&t->lock);
    return NULL;
}

/* `job` in up to `threads` members at once; when this returns it is done and nobody is inside. */
static void team_run(team *t, int threads, void (*job)(member *, void *), void *argument) {
    pthread_mutex_lock(&t->lock);
    for (int i = 0; i < t->max_phases; i++) {
        atomic_store_explicit(&t->phases[i].taken, 0, memory_order_relaxed);
        atomic_store_explicit(&t->phases[i].done, 0, memory_order_relaxed);
    }
    t->job = job;
    t->argument = argument;
    t->invited = threads;
    t->jobs++;
    if (threads > 1) pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&t->lock);
    t->members[0].phase = 0;
    job(&t->members[0], argument);
    pthread_mutex_lock(&t->lock);
    t->invited = 0;
    while (t->inside) pthread_cond_wait(&t->changed, &t->lock);
    pthread_mutex_unlock(&t->lock);
}

/* How many members the job in progress may have from now on, at least 1; nothing when there is none. From any thread. */
static void team_invite(team *t, int threads) {
    pthread_mutex_lock(&t->lock);
    int before = t->invited;
    if (before) t->invited = threads;
    if (before && threads > before) pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&t->lock);
}

static void team_close(team *t) {
    pthread_mutex_lock(&t->lock);
    t->closing = 1;
    pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&t->lock);
    for (int i = 0; i < t->started; i++) pthread_join(t->thread[i], NULL);
    pthread_cond_destroy(&t->changed);
    pthread_mutex_destroy(&t->lock);
    free(t->thread), free(t->members), free(t->phases);
}

/* Fewer threads than asked for, when the machine gives no more; 0 when there is no memory. */
static int team_open(team *t, unsigned threads, unsigned max_phases) {
    t->thread = calloc(threads, sizeof *t->thread);
    t->members = calloc(threads, sizeof *t->members);
    t->phases = calloc(max_phases, sizeof *t->phases);
    t->max_phases = (int)max_phases;
    if (!t->thread || !t->members || !t->phases) {
        free(t->thread), free(t->members), free(t->phases);
        return 0;
    }
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->changed, NULL);
    for (unsigned i = 0; i < threads; i++) t->members[i] = (member){t, (int)i, 0, 0, 0};
    while (t->started + 1u < threads &&
           pthread_create(&t->thread[t->started], NULL, team_member, &t->members[t->started + 1]) == 0)
        t->started++;
    return 1;
}

#endif
