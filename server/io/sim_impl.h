/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The inside of the simulator. sim.c holds the world, its events and its loops; sim_disk.c the disks;
 * sim_net.c the network. Nothing depends on addresses or on the real clock, so a seed is a whole history.
 */
#ifndef LARDER_SIM_IMPL_H
#define LARDER_SIM_IMPL_H

#include "server/io/impl.h"
#include "server/io/sim.h"

struct disk;
struct inode;
struct listener;
struct endpoint;
struct conn;

struct sim_event {
    uint64_t at_us, serial; /* ordered by both */
    void (*run)(struct sim *s, void *arg);
    void *arg;
};

struct sim_node {
    unsigned number, crashes;
    uint64_t changes;
    struct disk *disk;
};

/* Numbers are never used twice, so that use after close is noticed. */
struct sim_fd {
    int fd;
    struct sim_node *node;
    int flags; /* of open */
    struct inode *inode;
    struct listener *listener;
    struct endpoint *endpoint;
};

struct sim {
    struct sim_options options;
    struct sim_faults struck;    /* counts */
    uint64_t random, random_ids; /* states */
    uint64_t now_us, serial;
    int64_t clock_ns;    /* by which the wall clock was set */
    uint64_t operations; /* of disks */
    uint64_t traffic;    /* bytes that arrived while */
    bool counts_traffic;
    struct sim_event *heap;
    size_t event_count, event_room;
    struct sim_node **nodes;
    size_t node_count;
    struct list loops; /* of sim_loop */
    const struct sim_loop *turn;
    struct sim_fd **fds;
    size_t fd_count;
    struct list listeners, conns;
    unsigned next_port;
};

struct sim_loop {
    struct loop loop;
    struct sim *sim;
    struct sim_node *node;
    struct list in_sim;
    struct loop_msg *first, **end;
    bool turn_due, stopped, dead;
};

static inline struct sim_loop *sim_loop_of(struct loop *l)
{
    return container_of(l, struct sim_loop, loop);
}

uint64_t sim_below(struct sim *s, uint64_t n);          /* uniform in [0, n); 0 for n == 0 */
bool sim_strikes(struct sim *s, const uint32_t *fault); /* one of s->options.faults, by its chance; counted */
void sim_at(struct sim *s, uint64_t delay_us, void (*run)(struct sim *s, void *arg), void *arg);
void sim_forget(struct sim *s, void *arg); /* events with this argument do not happen */
uint64_t sim_stall_us(struct sim *s);
void sim_trace(struct sim *s, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* The operation is over. */
void sim_ready(struct io_op *op, int64_t result);
/* Makes another attempt, or ends the operation, by the result of the last. */
void sim_settle(struct io_op *op, int64_t result);

struct sim_fd *sim_fd_get(struct sim *s, const struct sim_node *n, int fd); /* NULL: bad descriptor */
struct sim_fd *sim_fd_new(struct sim *s, struct sim_node *n);               /* never NULL */
void sim_fd_free(struct sim *s, struct sim_fd *f);
void *sim_alloc(size_t n); /* zeroed; a simulator without memory is of no use, so never NULL */

/* sim_disk.c: immediate effects. Results as those of the system calls, negative errno. */
struct disk *disk_create(struct sim *s, uint64_t capacity_bytes);
void disk_destroy(struct disk *d);
void disk_crash(struct disk *d);
uint64_t disk_unsynced(struct disk *d);
int64_t disk_open(struct disk *d, const char *path, int flags, struct inode **out);
void disk_close(struct disk *d, struct sim_fd *f);
int64_t disk_read(struct disk *d, const struct sim_fd *f, void *p, size_t n, uint64_t offset);
/* A read of n bytes brought other sectors, of this file or of any. */
void disk_misdirect(struct disk *d, const struct sim_fd *f, uint8_t *p, size_t n);
unsigned *disk_rest(const struct sim_fd *f); /* reads of the file that will go well */
int64_t disk_write(struct disk *d, const struct sim_fd *f, const void *p, size_t n, uint64_t offset);
int64_t disk_sync(struct disk *d, const struct sim_fd *f);
void disk_break_sync(const struct sim_fd *f); /* later syncs of it succeed and do nothing, as Linux does */
int64_t disk_allocate(struct disk *d, const struct sim_fd *f, uint64_t n);
int64_t disk_truncate(struct disk *d, const struct sim_fd *f, uint64_t n);
int64_t disk_link(struct disk *d, const char *from, const char *to);
int64_t disk_unlink(struct disk *d, const char *path, bool folder);
int64_t disk_mkdir(struct disk *d, const char *path);
int64_t disk_stat(struct disk *d, const char *path, struct loop_stat *out);
int64_t disk_list(struct disk *d, const char *path, struct loop_names *out);
int disk_space(struct disk *d, const char *path, uint64_t *free_bytes, uint64_t *total_bytes);
int disk_lock(struct sim_fd *f);
int disk_file(struct disk *d, const char *path, bool durable_only, uint8_t **p, size_t *n);
int disk_flip(struct disk *d, const char *path, uint64_t offset, uint8_t mask);

/* sim_net.c. An operation that must wait is kept on a list of the network, in state IO_HELD. */
int net_listen(struct sim_loop *l, const char *host, const char *port, bool shared, int *fd, char *bound,
               size_t bound_size, struct err *e);
void net_perform(struct io_op *op); /* accept, connect, recv, send */
void net_shutdown(struct sim *s, struct sim_fd *f);
void net_peer(const struct sim_fd *f, char *out, size_t size);
void net_close(struct sim *s, struct sim_fd *f);
void net_crash(struct sim *s, struct sim_node *n, void (*fail)(struct io_op *op)); /* fail: each that waits */
void net_destroy(struct sim *s);

#endif
