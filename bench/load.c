// Closed-loop load generator for OpenAI's streaming API: one thread, epoll, raw sockets, so that it is not the bottleneck.
//
//   cc -O2 -o load load.c
//   load -b BODIES [-h HOST] [-p PORT] [-u PATH] [-c STREAMS] [-n REQUESTS] [-t MAX_SECONDS] [-d SECONDS] [-o OFFSET] [-r RAMP]
//        [-q] [-v]
//
// BODIES holds one JSON body a line; STREAMS requests are open at a time. Prints one JSON object: requests and tokens per
// second, time to first token and between tokens in ms, and the share of a core this program itself took. -d measures for
// that long, whatever -n says, or until SIGTERM: what is open then is cut off, its tokens so far count. -r opens the streams one by one, evenly over so
// many seconds. `jitter_ms`: how much the gaps between tokens, from the second token on, differ from the usual one, their median.
// -q asks for immediate ACKs, -v prints every event.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
static double now() {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}
typedef struct {
    float *v;
    size_t n, cap;
} vec;
static void push(vec *a, float x) {
    if (a->n == a->cap) {
        a->cap = a->cap ? a->cap * 2 : 4096;
        a->v = realloc(a->v, a->cap * sizeof(float));
    }
    a->v[a->n++] = x;
}
static int cmpf(const void *a, const void *b) {
    float x = *(float *)a, y = *(float *)b;
    return x < y ? -1 : x > y;
}
static double pct(vec *a, double p) {
    if (!a->n)
        return 0;
    size_t i = (size_t)(p * (a->n - 1) + .5);
    return a->v[i];
}
static double mean(vec *a) {
    double s = 0;
    for (size_t i = 0; i < a->n; i++)
        s += a->v[i];
    return a->n ? s / a->n : 0;
}
enum { ST_HDR, ST_CL, ST_CHSIZE, ST_CHDATA, ST_CHCRLF, ST_TRAIL, ST_EOF };
typedef struct {
    int fd, st, status;
    int active;
    char hdr[8192];
    int hl;
    long left;
    char line[65536];
    int ll;
    char csz[32];
    int cl;
    double t0, tl;
    int events;
    long usage, prompt;
    size_t woff;
    char *req;
    size_t rl;
    int sse;
    int reused;
} conn;
static char *host = "127.0.0.1", *path = "/v1/chat/completions";
static int port = 8000, C = 1;
static long N = 100;
static double maxs = 110, window = 0, ramp = 0;
static int verbose = 0;
static char **bodies;
static int nb;
static long issued, done_, errs, tok_ev, tok_us, tok_prompt, bytes_;
static vec ttft, itl, jitter, e2e;
static int ep;
static double lastdone;
static long off = 0;
static int closing = 0, qack = 0;
static volatile sig_atomic_t told_to_end;
static void end_now(int number) {
    (void)number;
    told_to_end = 1;
}
static void dial(conn *c) {
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    int one = 1;
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port)};
    inet_pton(AF_INET, host, &a.sin_addr);
    if (connect(c->fd, (void *)&a, sizeof a)) {
        perror("connect");
        exit(2);
    }
    fcntl(c->fd, F_SETFL, O_NONBLOCK);
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
    epoll_ctl(ep, EPOLL_CTL_ADD, c->fd, &e);
    c->reused = 0;
}
static void flush_(conn *c) {
    while (c->woff < c->rl) {
        ssize_t k = send(c->fd, c->req + c->woff, c->rl - c->woff, MSG_NOSIGNAL);
        if (k < 0) {
            if (errno == EAGAIN) {
                struct epoll_event e = {.events = EPOLLIN | EPOLLOUT, .data.ptr = c};
                epoll_ctl(ep, EPOLL_CTL_MOD, c->fd, &e);
                return;
            }
            return;
        }
        c->woff += k;
    }
}
static void start(conn *c) {
    if ((issued >= N && !window) || closing) {
        c->active = 0;
        return;
    }
    char *b = bodies[(issued + off) % nb];
    issued++;
    free(c->req);
    c->rl = asprintf(&c->req,
                     "POST %s HTTP/1.1\r\nHost: %s:%d\r\nContent-Type: application/json\r\nAuthorization: Bearer "
                     "sk-1234\r\nAccept: text/event-stream\r\nContent-Length: %zu\r\n\r\n%s",
                     path, host, port, strlen(b), b);
    c->woff = 0;
    c->st = ST_HDR;
    c->hl = 0;
    c->ll = 0;
    c->cl = 0;
    c->events = 0;
    c->usage = -1;
    c->prompt = 0;
    c->active = 1;
    c->sse = 0;
    c->t0 = c->tl = now();
    flush_(c);
}
static long number_after(const char *text, const char *key) {
    const char *at = strstr(text, key);
    return at ? atol(at + strlen(key)) : -1;
}
static void line_(conn *c, double t) {
    if (c->ll && c->line[c->ll - 1] == '\r')
        c->ll--;
    c->line[c->ll] = 0;
    char *l = c->line;
    c->ll = 0;
    char *p = l;
    if (!strncmp(l, "data:", 5))
        p = l + 5;
    else if (c->sse || l[0] != '{')
        return;
    if (strstr(p, "[DONE]"))
        return;
    if (verbose)
        fprintf(stderr, "%s\n", l);
    long v = number_after(p, "\"completion_tokens\":");
    if (v > c->usage)
        c->usage = v;
    v = number_after(p, "\"prompt_tokens\":");
    if (v > c->prompt)
        c->prompt = v;
    // content event = has non-empty content/text delta
    int has = 0;
    char *q = p;
    static const char *keys[] = {"\"content\":", "\"text\":", "\"reasoning_content\":"};
    for (int i = 0; i < 3 && !has; i++) {
        q = strstr(p, keys[i]);
        if (q) {
            q += strlen(keys[i]);
            while (*q == ' ')
                q++;
            if (*q == '"' && q[1] != '"')
                has = 1;
        }
    }
    if (has) {
        if (c->events == 0)
            push(&ttft, (t - c->t0) * 1e3);
        else
            push(&itl, (t - c->tl) * 1e3);
        if (c->events > 1)
            push(&jitter, (t - c->tl) * 1e3);
        c->tl = t;
        c->events++;
    }
    if (strstr(p, "\"error\"") && !has) {
        if (errs < 3)
            fprintf(stderr, "ERR %.300s\n", l);
    }
}
static void feed(conn *c, const char *b, long n, double t) {
    for (long i = 0; i < n;) {
        const char *nl = memchr(b + i, '\n', n - i);
        long k = nl ? nl - (b + i) : n - i;
        if (c->ll + k < (long)sizeof(c->line) - 1) {
            memcpy(c->line + c->ll, b + i, k);
            c->ll += k;
        }
        i += k;
        if (nl) {
            line_(c, t);
            i++;
        }
    }
}
static void finish(conn *c, double t) {
    if (c->ll)
        line_(c, t);
    done_++;
    lastdone = t;
    if (c->status != 200) {
        errs++;
        if (errs <= 3)
            fprintf(stderr, "status %d %.500s\n", c->status, c->line);
    } else if (!c->events && c->usage <= 0)
        errs++;
    tok_ev += c->events;
    tok_us += c->usage > 0 ? c->usage : c->events;
    tok_prompt += c->prompt;
    push(&e2e, (t - c->t0) * 1e3);
    c->reused = 1;
    start(c);
}
static void recon(conn *c) {
    epoll_ctl(ep, EPOLL_CTL_DEL, c->fd, 0);
    close(c->fd);
    dial(c);
}
static void onread(conn *c) {
    static char buf[1 << 18];
    for (;;) {
        ssize_t k = recv(c->fd, buf, sizeof buf, 0);
        if (qack) {
            int one = 1;
            setsockopt(c->fd, IPPROTO_TCP, TCP_QUICKACK, &one, sizeof one);
        }
        if (k < 0) {
            if (errno == EAGAIN)
                return;
            k = 0;
        }
        double t = now();
        if (k == 0) {
            if (!c->active) {
                epoll_ctl(ep, EPOLL_CTL_DEL, c->fd, 0);
                close(c->fd);
                c->fd = -1;
                return;
            }
            if (c->st == ST_EOF) {
                recon(c);
                finish(c, t);
                return;
            }
            if (c->st == ST_HDR && c->hl == 0 && c->reused) {
                recon(c);
                c->woff = 0;
                flush_(c);
                return;
            }
            errs++;
            done_++;
            lastdone = t;
            if (errs < 4)
                fprintf(stderr, "unexpected close st=%d\n", c->st);
            recon(c);
            start(c);
            return;
        }
        bytes_ += k;
        char *p = buf, *e = buf + k;
        while (p < e) {
            switch (c->st) {
            case ST_HDR: {
                while (p < e && c->hl < (int)sizeof(c->hdr) - 1) {
                    c->hdr[c->hl++] = *p++;
                    if (c->hl >= 4 && !memcmp(c->hdr + c->hl - 4, "\r\n\r\n", 4)) {
                        c->hdr[c->hl] = 0;
                        c->status = atoi(c->hdr + 9);
                        char *x;
                        if (c->status == 100) {
                            c->hl = 0;
                            break;
                        }
                        if (strcasestr(c->hdr, "text/event-stream"))
                            c->sse = 1;
                        if (strcasestr(c->hdr, "transfer-encoding: chunked")) {
                            c->st = ST_CHSIZE;
                            c->cl = 0;
                        } else if ((x = strcasestr(c->hdr, "content-length:"))) {
                            c->left = atol(x + 15);
                            c->st = ST_CL;
                            if (!c->left) {
                                finish(c, t);
                                if (!c->active)
                                    return;
                            }
                        } else
                            c->st = ST_EOF;
                        break;
                    }
                }
                break;
            }
            case ST_CL: {
                long n = e - p < c->left ? e - p : c->left;
                feed(c, p, n, t);
                p += n;
                c->left -= n;
                if (!c->left) {
                    int cl = strcasestr(c->hdr, "connection: close") != 0;
                    if (cl)
                        recon(c);
                    finish(c, t);
                    if (cl)
                        return;
                }
                break;
            }
            case ST_EOF:
                feed(c, p, e - p, t);
                p = e;
                break;
            case ST_CHSIZE: {
                char ch = *p++;
                if (ch == '\n') {
                    c->csz[c->cl] = 0;
                    c->left = strtol(c->csz, 0, 16);
                    c->cl = 0;
                    c->st = c->left ? ST_CHDATA : ST_TRAIL;
                } else if (c->cl < 30)
                    c->csz[c->cl++] = ch;
                break;
            }
            case ST_CHDATA: {
                long n = e - p < c->left ? e - p : c->left;
                feed(c, p, n, t);
                p += n;
                c->left -= n;
                if (!c->left)
                    c->st = ST_CHCRLF;
                break;
            }
            case ST_CHCRLF:
                if (*p++ == '\n')
                    c->st = ST_CHSIZE;
                break;
            case ST_TRAIL:
                if (*p++ == '\n') {
                    int cl = strcasestr(c->hdr, "connection: close") != 0;
                    if (cl)
                        recon(c);
                    finish(c, t);
                    if (cl)
                        return;
                }
                break;
            }
        }
        if (k < (ssize_t)sizeof buf)
            return;
    }
}
int main(int ac, char **av) {
    char *bf = 0;
    int o;
    while ((o = getopt(ac, av, "h:p:u:c:n:b:t:d:vqo:r:")) > 0) {
        if (o == 'h')
            host = optarg;
        if (o == 'p')
            port = atoi(optarg);
        if (o == 'u')
            path = optarg;
        if (o == 'c')
            C = atoi(optarg);
        if (o == 'n')
            N = atol(optarg);
        if (o == 'b')
            bf = optarg;
        if (o == 't')
            maxs = atof(optarg);
        if (o == 'd')
            window = atof(optarg);
        if (o == 'v')
            verbose = 1;
        if (o == 'q')
            qack = 1;
        if (o == 'o')
            off = atol(optarg);
        if (o == 'r')
            ramp = atof(optarg);
    }
    FILE *f = fopen(bf, "r");
    if (!f) {
        perror(bf);
        return 2;
    }
    char *l = 0;
    size_t lc = 0;
    ssize_t r;
    while ((r = getline(&l, &lc, f)) > 0) {
        while (r && (l[r - 1] == '\n' || l[r - 1] == '\r'))
            l[--r] = 0;
        if (!r)
            continue;
        bodies = realloc(bodies, (nb + 1) * sizeof *bodies);
        bodies[nb++] = strdup(l);
    }
    signal(SIGTERM, end_now);
    ep = epoll_create1(0);
    conn *cs = calloc(C, sizeof *cs);
    for (int i = 0; i < C && !ramp; i++)
        dial(cs + i);
    double T0 = now();
    lastdone = T0;
    int begun = 0;
    struct epoll_event ev[1024];
    for (;;) {
        for (; begun < C && now() >= T0 + ramp * begun / C; begun++) {
            if (ramp)
                dial(cs + begun);
            start(cs + begun);
        }
        int act = begun < C;
        for (int i = 0; i < begun; i++)
            act += cs[i].active;
        if (!act)
            break;
        int k = epoll_wait(ep, ev, 1024, begun < C ? 1 : window ? 10 : 1000);
        if (told_to_end || (window && now() - T0 >= window)) {
            for (int i = 0; i < C; i++)
                if (cs[i].active)
                    tok_ev += cs[i].events, tok_us += cs[i].events;
            lastdone = now();
            break;
        }
        if (now() - T0 > maxs) {
            if (!closing) {
                fprintf(stderr, "time limit\n");
            }
            break;
        }
        for (int i = 0; i < k; i++) {
            conn *c = ev[i].data.ptr;
            if (ev[i].events & EPOLLOUT) {
                struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
                epoll_ctl(ep, EPOLL_CTL_MOD, c->fd, &e);
                flush_(c);
            }
            if (ev[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR))
                onread(c);
        }
    }
    double T = lastdone - T0;
    if (T <= 0)
        T = 1e-9;
    struct rusage ru;
    getrusage(RUSAGE_SELF, &ru);
    double cpu = ru.ru_utime.tv_sec + ru.ru_utime.tv_usec * 1e-6 + ru.ru_stime.tv_sec + ru.ru_stime.tv_usec * 1e-6;
    qsort(ttft.v, ttft.n, 4, cmpf);
    qsort(itl.v, itl.n, 4, cmpf);
    qsort(jitter.v, jitter.n, 4, cmpf);
    float usual = pct(&jitter, .5);
    for (size_t i = 0; i < jitter.n; i++)
        jitter.v[i] = fabsf(jitter.v[i] - usual);
    qsort(jitter.v, jitter.n, 4, cmpf);
    qsort(e2e.v, e2e.n, 4, cmpf);
    printf("{\"c\":%d,\"n\":%ld,\"errors\":%ld,\"secs\":%.3f,\"rps\":%.1f,\"tok_s\":%.1f,\"events_s\":%.1f,\"tokens\":%"
           "ld,\"prompt_tokens\":%ld,\"ttft_ms\":{\"mean\":%.3f,\"p50\":%.3f,\"p90\":%.3f,\"p99\":%.3f},\"itl_ms\":{\"mean\":%.3f,\"p50\":%."
           "3f,\"p99\":%.3f},\"jitter_ms\":{\"p50\":%.3f,\"p99\":%.3f},\"e2e_ms\":{\"p50\":%.3f,\"p99\":%.3f},\"MBps\":%.1f,"
           "\"client_cpu_frac\":%.2f}\n",
           C, done_, errs, T, done_ / T, tok_us / T, tok_ev / T, tok_us, tok_prompt, mean(&ttft), pct(&ttft, .5), pct(&ttft, .9),
           pct(&ttft, .99), mean(&itl), pct(&itl, .5), pct(&itl, .99), pct(&jitter, .5), pct(&jitter, .99), pct(&e2e, .5),
           pct(&e2e, .99), bytes_ / T / 1e6, cpu / T);
    return errs ? 1 : 0;
}
