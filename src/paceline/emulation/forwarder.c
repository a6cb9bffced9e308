/* Connects the ports of an emulated cluster. Every frame is delayed by its transfer time on the
   sender's link, a fixed latency, and its transfer time on the receiver's link.

   forwarder DELAY_NS PORT=BITS_PER_SECOND...

   A rate of 0 means no limit. Each link stores the time at which it is free again, so no frame
   arrives earlier than over a cable, and late wake-ups do not reduce the rate. The destination
   address contains the port number: 02:70:63:6c followed by the number, as assigned by network.py.
   Multicast frames go to all other ports. Frames keep the kernel's offload header, so TCP segments
   of up to 64 kB are not split. The process exits when a port is removed. */
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
    READS_IN_A_ROW = 64, /* per port, before other ports and due frames are served */
    SOCKET_BYTES = 32 << 20,
};
static const size_t QUEUE_BYTES = 256u << 20;    /* total size of queued frames */
static const int64_t SECOND = 1000000000;
static const int64_t QUEUE_NS = 100 * 1000000LL; /* a link drops frames beyond this delay */

struct frame {
    struct frame *next;
    int64_t due;
    size_t bytes;
    unsigned char content[];
};
struct port {
    int socket;
    double ns_per_byte;
    int64_t out_free, in_free; /* when the node's link is free again */
    struct frame *first, **last;
};
static struct port *ports;
static int count;
static int64_t delay;
static size_t queued_bytes;

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
        setsockopt(fd, SOL_SOCKET, polite, &bytes, sizeof bytes); /* up to the user limit */
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

/* Arrival time of a frame, by the kernel's timestamp: this process may wake up late. */
static int64_t arrival(struct msghdr *message) {
    int64_t age = 0;
    struct cmsghdr *part = CMSG_FIRSTHDR(message);
    if (part && part->cmsg_level == SOL_SOCKET && part->cmsg_type == SCM_TIMESTAMPNS) {
        struct timespec time;
        memcpy(&time, CMSG_DATA(part), sizeof time);
        age = now(CLOCK_REALTIME) - (time.tv_sec * SECOND + time.tv_nsec);
    }
    if (age < 0 || age > SECOND) age = 0; /* the system clock was changed */
    return now(CLOCK_MONOTONIC) - age;
}

/* Bytes on a real cable: large frames are segmented, and each segment has its own headers. */
static int64_t bytes_on_wire(const unsigned char *content, size_t bytes) {
    struct virtio_net_hdr header;
    memcpy(&header, content, sizeof header);
    size_t whole = bytes - HEADER;
    if (header.gso_type == VIRTIO_NET_HDR_GSO_NONE || !header.gso_size || header.hdr_len >= whole)
        return (int64_t)whole;
    size_t pieces = (whole - header.hdr_len + header.gso_size - 1) / header.gso_size;
    return (int64_t)(whole + (pieces - 1) * header.hdr_len);
}

static void enqueue(struct port *to, const unsigned char *content, size_t bytes, int64_t sent,
                    int64_t over) {
    int64_t wire = bytes_on_wire(content, bytes);
    int64_t begin = sent + delay > to->in_free ? sent + delay : to->in_free;
    int64_t end = begin + (int64_t)((double)wire * to->ns_per_byte);
    if (end < over + delay) end = over + delay;
    if (begin - sent - delay > QUEUE_NS || queued_bytes + bytes > QUEUE_BYTES) return;
    struct frame *frame = malloc(sizeof *frame + bytes);
    if (!frame) return;
    *frame = (struct frame){.due = end, .bytes = bytes};
    memcpy(frame->content, content, bytes);
    queued_bytes += bytes;
    to->in_free = end;
    *to->last = frame;
    to->last = &frame->next;
}

static void route(struct port *from, const unsigned char *content, size_t bytes, int64_t came) {
    static const unsigned char prefix[4] = {0x02, 0x70, 0x63, 0x6c};
    const unsigned char *address = content + HEADER;
    if (bytes < HEADER + sizeof(struct ether_header)) return;
    int64_t sent = came > from->out_free ? came : from->out_free;
    if (sent - came > QUEUE_NS) return;
    from->out_free = sent + (int64_t)((double)bytes_on_wire(content, bytes) * from->ns_per_byte);
    int number = memcmp(address, prefix, sizeof prefix) ? -1 : address[4] << 8 | address[5];
    for (int i = 0; i < count; i++)
        if (number < 0 ? (address[0] & 1) && ports + i != from : i == number)
            enqueue(ports + i, content, bytes, sent, from->out_free);
}

static void receive(struct port *port) {
    static unsigned char content[LARGEST];
    for (int i = 0; i < READS_IN_A_ROW; i++) {
        char control[64];
        struct iovec space = {content, sizeof content};
        struct msghdr message = {.msg_iov = &space, .msg_iovlen = 1,
                                 .msg_control = control, .msg_controllen = sizeof control};
        ssize_t bytes = recvmsg(port->socket, &message, 0);
        if (bytes < 0 && (errno == EAGAIN || errno == EINTR)) return;
        if (bytes < 0) fail("port");
        route(port, content, (size_t)bytes, arrival(&message));
    }
}

/* Sends all due frames; returns the time at which the next one is due, or 0. */
static int64_t send_due(void) {
    int64_t next = 0;
    for (struct port *port = ports; port < ports + count; port++) {
        int64_t time = now(CLOCK_MONOTONIC);
        while (port->first && port->first->due <= time) {
            struct frame *frame = port->first;
            if (send(port->socket, frame->content, frame->bytes, 0) < 0 && errno == ENXIO)
                fail("port");
            queued_bytes -= frame->bytes;
            if (!(port->first = frame->next)) port->last = &port->first;
            free(frame);
        }
        if (port->first && (!next || port->first->due < next)) next = port->first->due;
    }
    return next;
}

int main(int words, char **word) {
    if (words < 3) return 2;
    int64_t armed = 0;
    delay = atoll(word[1]);
    count = words - 2;
    ports = calloc((size_t)count, sizeof *ports);
    int waiting = epoll_create1(EPOLL_CLOEXEC);
    int timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN};
    if (!ports || waiting < 0 || timer < 0) fail("start");
    if (epoll_ctl(waiting, EPOLL_CTL_ADD, timer, &event)) fail("epoll");
    for (int i = 0; i < count; i++) {
        char *rate = strchr(word[2 + i], '=');
        if (!rate) return 2;
        *rate++ = 0;
        struct port *port = event.data.ptr = ports + i;
        port->last = &port->first;
        port->ns_per_byte = atof(rate) > 0 ? 8e9 / atof(rate) : 0;
        port->socket = open_port(word[2 + i]);
        if (epoll_ctl(waiting, EPOLL_CTL_ADD, port->socket, &event)) fail("epoll");
    }
    setpriority(PRIO_PROCESS, 0, -20); /* late frames distort the rate; fails without root */
    for (;;) {
        struct epoll_event events[64];
        int ready = epoll_wait(waiting, events, 64, -1);
        if (ready < 0 && errno != EINTR) fail("epoll_wait");
        for (int i = 0; i < ready; i++)
            if (events[i].data.ptr) receive(events[i].data.ptr);
        int64_t next = send_due();
        if (next && next != armed) {
            struct itimerspec at = {.it_value = {next / SECOND, next % SECOND}};
            if (timerfd_settime(timer, TFD_TIMER_ABSTIME, &at, NULL)) fail("timer");
            armed = next;
        }
        uint64_t expirations; /* an expired timer that is not read stays ready */
        if (!next && read(timer, &expirations, sizeof expirations) > 0) armed = 0;
    }
}
