/* Joins the ports of an emulated cluster like a switch that keeps every frame for a fixed time.

   forwarder DELAY_NS PORT...

   A frame's destination is in its address: 02:70:63:6c and the number of the port, as links.py
   gives them out; frames for a group go to all other ports. Frames pass with the offload header
   of the kernel before them, so that what TCP sends in pieces of 64 kB stays whole. It ends when a
   port goes away. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <linux/if_packet.h>
#include <linux/virtio_net.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum {
    HEADER = sizeof(struct virtio_net_hdr),
    LARGEST = HEADER + 65536 + 64,
    READS_IN_A_ROW = 64, /* of one port, before the others and what is due get their turn */
    SOCKET_BYTES = 32 << 20,
};
static const size_t QUEUE_BYTES = 256u << 20;
static const int64_t SECOND = 1000000000;

struct frame {
    struct frame *next;
    int64_t due;
    int to, except; /* to < 0: all ports but one */
    size_t bytes;
    unsigned char content[];
};
static struct frame *first, **last = &first;
static size_t queued_bytes;
static int ports, *sockets;

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static int64_t now(clockid_t clock) {
    struct timespec time;
    clock_gettime(clock, &time);
    return time.tv_sec * SECOND + time.tv_nsec;
}

static void enlarge(int fd, int forced, int polite) {
    int bytes = SOCKET_BYTES;
    if (setsockopt(fd, SOL_SOCKET, forced, &bytes, sizeof bytes))
        setsockopt(fd, SOL_SOCKET, polite, &bytes, sizeof bytes); /* as far as a user may */
}

static int open_port(const char *name) {
    int on = 1, fd = socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    struct sockaddr_ll address = {.sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_ALL)};
    if (fd < 0 || !(address.sll_ifindex = if_nametoindex(name))) fail(name);
    if (setsockopt(fd, SOL_PACKET, PACKET_VNET_HDR, &on, sizeof on)) fail("PACKET_VNET_HDR");
    if (setsockopt(fd, SOL_PACKET, PACKET_IGNORE_OUTGOING, &on, sizeof on))
        fail("PACKET_IGNORE_OUTGOING");
    if (setsockopt(fd, SOL_SOCKET, SO_TIMESTAMPNS, &on, sizeof on)) fail("SO_TIMESTAMPNS");
    enlarge(fd, SO_RCVBUFFORCE, SO_RCVBUF);
    enlarge(fd, SO_SNDBUFFORCE, SO_SNDBUF);
    if (bind(fd, (struct sockaddr *)&address, sizeof address)) fail(name);
    return fd;
}

/* When a frame came: the kernel knows better than a process that had to be woken. */
static int64_t arrival(struct msghdr *message) {
    int64_t age = 0;
    struct cmsghdr *part = CMSG_FIRSTHDR(message);
    if (part && part->cmsg_level == SOL_SOCKET && part->cmsg_type == SCM_TIMESTAMPNS) {
        struct timespec time;
        memcpy(&time, CMSG_DATA(part), sizeof time);
        age = now(CLOCK_REALTIME) - (time.tv_sec * SECOND + time.tv_nsec);
    }
    if (age < 0 || age > SECOND) age = 0; /* somebody set the clock */
    return now(CLOCK_MONOTONIC) - age;
}

static void enqueue(int port, const unsigned char *content, size_t bytes, int64_t due) {
    static const unsigned char prefix[4] = {0x02, 0x70, 0x63, 0x6c};
    const unsigned char *address = content + HEADER;
    int to = -1;
    if (bytes < HEADER + sizeof(struct ether_header) || queued_bytes + bytes > QUEUE_BYTES) return;
    if (!memcmp(address, prefix, sizeof prefix)) to = address[4] << 8 | address[5];
    if ((to < 0 && !(address[0] & 1)) || to >= ports) return;
    struct frame *frame = malloc(sizeof *frame + bytes);
    if (!frame) return;
    *frame = (struct frame){.due = due, .to = to, .except = port, .bytes = bytes};
    memcpy(frame->content, content, bytes);
    queued_bytes += bytes;
    *last = frame;
    last = &frame->next;
}

static void receive(int port, int64_t delay) {
    static unsigned char content[LARGEST];
    for (int i = 0; i < READS_IN_A_ROW; i++) {
        char control[64];
        struct iovec space = {content, sizeof content};
        struct msghdr message = {.msg_iov = &space, .msg_iovlen = 1,
                                 .msg_control = control, .msg_controllen = sizeof control};
        ssize_t bytes = recvmsg(sockets[port], &message, 0);
        if (bytes < 0 && (errno == EAGAIN || errno == EINTR)) return;
        if (bytes < 0) fail("port");
        enqueue(port, content, (size_t)bytes, arrival(&message) + delay);
    }
}

/* A port whose queue is full loses the frame, as a switch would. */
static void send_due(void) {
    int64_t time = now(CLOCK_MONOTONIC);
    while (first && first->due <= time) {
        struct frame *frame = first;
        for (int port = 0; port < ports; port++)
            if (port == frame->to || (frame->to < 0 && port != frame->except))
                if (send(sockets[port], frame->content, frame->bytes, 0) < 0 && errno == ENXIO)
                    fail("port");
        queued_bytes -= frame->bytes;
        if (!(first = frame->next)) last = &first;
        free(frame);
    }
}

int main(int count, char **words) {
    if (count < 3) return 2;
    int64_t delay = atoll(words[1]), armed = 0;
    ports = count - 2;
    sockets = calloc((size_t)ports, sizeof *sockets);
    int waiting = epoll_create1(EPOLL_CLOEXEC);
    int timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = -1};
    if (!sockets || waiting < 0 || timer < 0) fail("start");
    if (epoll_ctl(waiting, EPOLL_CTL_ADD, timer, &event)) fail("epoll");
    for (int port = 0; port < ports; port++) {
        event.data.fd = port;
        sockets[port] = open_port(words[2 + port]);
        if (epoll_ctl(waiting, EPOLL_CTL_ADD, sockets[port], &event)) fail("epoll");
    }
    setpriority(PRIO_PROCESS, 0, -20); /* late frames are wrong ones; a user may not, and goes on */
    for (;;) {
        struct epoll_event events[64];
        int ready = epoll_wait(waiting, events, 64, -1);
        if (ready < 0 && errno != EINTR) fail("epoll_wait");
        for (int i = 0; i < ready; i++)
            if (events[i].data.fd >= 0) receive(events[i].data.fd, delay);
        send_due();
        if (first && first->due != armed) {
            struct itimerspec at = {.it_value = {first->due / SECOND, first->due % SECOND}};
            armed = first->due;
            if (timerfd_settime(timer, TFD_TIMER_ABSTIME, &at, NULL)) fail("timer");
        }
        uint64_t expired; /* an alarm that nothing waits for any more would ring on and on */
        if (!first && read(timer, &expired, sizeof expired) > 0) armed = 0;
    }
}
