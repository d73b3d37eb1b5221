/* A team of threads that computes one function together, and sleeps between two.
 *
 * The caller is member 0. Members meet at barriers: they look for some microseconds, because the others are nearly there, then
 * sleep, because the others may have lost their core. Work is taken piece by piece, so that a slow member gets less of it.
 */
#ifndef HR_TEAM_H
#define HR_TEAM_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#define LOOKS 2000 /* at some 40 cycles each: 20-30 us */

#if defined(__x86_64__) || defined(__i386__)
#define relax() __builtin_ia32_pause()
#else
#define relax() ((void)0)
#endif

typedef struct team team;

typedef struct {
    team *of;
    int number, turn; /* turn: which of the two counters this member takes from */
} member;

struct team {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t *thread;
    member *members;
    int started; /* threads that exist, beside the caller */
    int at_work; /* members of the present job, the caller included */
    int closing;
    unsigned jobs;
    atomic_uint passed; /* barriers so far */
    atomic_int arrived, taken[2];
    void (*job)(member *, void *);
    void *argument;
};

/* Returns when all members of the job are here. */
static void team_meet(team *t) {
    unsigned before = atomic_load(&t->passed);
    if (t->at_work == 1) return;
    if (atomic_fetch_add(&t->arrived, 1) + 1 == t->at_work) {
        atomic_store(&t->arrived, 0);
        pthread_mutex_lock(&t->lock);
        atomic_store(&t->passed, before + 1);
        pthread_cond_broadcast(&t->changed);
        pthread_mutex_unlock(&t->lock);
        return;
    }
    for (int i = 0; i < LOOKS; i++) {
        if (atomic_load_explicit(&t->passed, memory_order_acquire) != before) return;
        relax();
    }
    pthread_mutex_lock(&t->lock);
    while (atomic_load(&t->passed) == before) pthread_cond_wait(&t->changed, &t->lock);
    pthread_mutex_unlock(&t->lock);
}

/* The next piece [first, end) of `total`; 0 when nothing is left. */
static int team_take(member *m, int total, int piece, int *first, int *end) {
    *first = atomic_fetch_add(&m->of->taken[m->turn], piece);
    *end = *first + piece < total ? *first + piece : total;
    return *first < total;
}

/* Ends a phase: all its pieces are done. Two counters in turn: nobody takes from the next but one before member 0 reset it. */
static void team_finish(member *m) {
    team_meet(m->of);
    if (m->number == 0) atomic_store(&m->of->taken[m->turn], 0);
    m->turn ^= 1;
}

static void *team_member(void *argument) {
    member *m = argument;
    team *t = m->of;
    unsigned seen = 0;
    pthread_mutex_lock(&t->lock);
    for (;;) {
        while (t->jobs == seen && !t->closing) pthread_cond_wait(&t->changed, &t->lock);
        if (t->closing) break;
        seen = t->jobs;
        if (m->number >= t->at_work) continue;
        pthread_mutex_unlock(&t->lock);
        t->job(m, t->argument);
        team_meet(t); /* from here on it touches nothing of this job */
        pthread_mutex_lock(&t->lock);
    }
    pthread_mutex_unlock(&t->lock);
    return NULL;
}

/* `job` in `threads` members at once; all are done when this returns. */
static void team_run(team *t, int threads, void (*job)(member *, void *), void *argument) {
    pthread_mutex_lock(&t->lock);
    t->at_work = threads <= t->started + 1 ? threads : t->started + 1;
    t->job = job;
    t->argument = argument;
    for (int i = 0; i <= t->started; i++) t->members[i].turn = 0;
    t->jobs++;
    if (t->at_work > 1) pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&t->lock);
    job(&t->members[0], argument);
    team_meet(t);
}

static void team_close(team *t) {
    pthread_mutex_lock(&t->lock);
    t->closing = 1;
    pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&t->lock);
    for (int i = 0; i < t->started; i++) pthread_join(t->thread[i], NULL);
    pthread_cond_destroy(&t->changed);
    pthread_mutex_destroy(&t->lock);
    free(t->thread);
    free(t->members);
}

/* Fewer threads than asked for, when the machine gives no more; 0 when there is no memory. */
static int team_open(team *t, unsigned threads) {
    t->thread = calloc(threads, sizeof *t->thread);
    t->members = calloc(threads, sizeof *t->members);
    if (!t->thread || !t->members) {
        free(t->thread);
        free(t->members);
        return 0;
    }
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->changed, NULL);
    for (unsigned i = 0; i < threads; i++) t->members[i] = (member){t, (int)i, 0};
    while (t->started + 1u < threads &&
           pthread_create(&t->thread[t->started], NULL, team_member, &t->members[t->started + 1]) == 0)
        t->started++;
    return 1;
}

#endif
