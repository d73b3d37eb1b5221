/* For LD_PRELOAD: TCP_NODELAY on every socket that connects or is accepted, for servers that leave it off. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

static void send_at_once(int socket) {
    int on = 1;
    setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on); /* fails, and may, on what is no TCP socket */
}

int connect(int socket, const struct sockaddr *to, socklen_t length) {
    int (*real)(int, const struct sockaddr *, socklen_t) = dlsym(RTLD_NEXT, "connect");
    send_at_once(socket);
    return real(socket, to, length);
}

int accept4(int socket, struct sockaddr *from, socklen_t *length, int flags) {
    int (*real)(int, struct sockaddr *, socklen_t *, int) = dlsym(RTLD_NEXT, "accept4");
    int accepted = real(socket, from, length, flags);
    if (accepted >= 0) send_at_once(accepted);
    return accepted;
}
