/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The loop on a seeded simulator: a world of nodes, each with loops and a disk of its own, one network and
 * one clock. Everything that happens follows from the seed; the same seed gives the same trace. All of it
 * runs on one thread, loop_post too. Descriptors are never used twice, and O_DIRECT wants offset, length and
 * memory on borders of 4 KiB, so that mistakes show.
 */
#ifndef LARDER_SIM_H
#define LARDER_SIM_H

#include "server/io/loop.h"

struct sim;

/* Chances are per million operations unless said otherwise. */
struct sim_faults {
    uint32_t read_error;       /* -EIO */
    uint32_t read_corrupt;     /* one bit of what was read is wrong, and nobody says so */
    uint32_t read_misdirected; /* or sectors of it are those of another place of the disk */
    uint32_t write_error;      /* -EIO, some of it may be on disk */
    uint32_t write_no_space;   /* -ENOSPC */
    uint32_t sync_error;       /* -EIO, and what was not durable stays so */
    uint32_t short_transfer;   /* completes in pieces */
    uint32_t connection_cut;
    uint32_t stall_ms_max; /* extra delay of an operation or message, uniform */
    bool lose_unsynced; /* at a crash: any subset of unsynced blocks of 512 bytes, and of folder entries, is
                           lost */
    uint32_t lose_way;  /* which subset; not a chance */
    /* So many reads of a file are not wrong after one that was, or that failed: reading again shows what is
     * there. Not a chance. */
    uint32_t misread_rest;
    /* The disk operation of that number (from 1, of all nodes; opens, lists and stats count too) fails with
     * -fail_errno and changes nothing; 0: none. Not a chance. ENOSPC is only for those that need space. */
    uint32_t fail_at, fail_errno;
    /* The connection breaks on which the byte of that number (from 1) of the counted traffic arrives; what
     * came before it may be read. 0: none. Not a chance. */
    uint32_t cut_at;
};

/* Ways of losing. What is not durable counts in units: sectors of 512 bytes, lengths, folder entries. From
 * SIM_LOSE_BUT on, in turn: all but the i-th unit is lost, only the i-th is lost. */
enum { SIM_LOSE_ANY = 0 /* by seed */, SIM_LOSE_ALL = 1, SIM_LOSE_NOTHING = 2, SIM_LOSE_BUT = 3 };

struct sim_options {
    uint64_t seed;
    uint64_t disk_bytes; /* capacity of each disk; 0: 1 TiB (sparse) */
    struct sim_faults faults;
    void (*trace)(void *arg, const char *line); /* NULL: none */
    void *trace_arg;
};

must_check struct sim *sim_create(const struct sim_options *o);
void sim_destroy(struct sim *s); /* every loop must be destroyed before */
void sim_set_faults(struct sim *s, const struct sim_faults *f);
/* How often each of them has struck (of those with a chance). */
const struct sim_faults *sim_struck(const struct sim *s);

/* Nodes are numbered 0.. and made on first use; loops of one node share its disk. Addresses are "nodeN":port.
 */
must_check struct loop *sim_loop(struct sim *s, unsigned node);

/* Runs until nothing is left to do, every loop has stopped, or until `until` (may be NULL) returns true, at
 * most max_events. Returns events run. */
uint64_t sim_run(struct sim *s, bool (*until)(void *arg), void *arg, uint64_t max_events);
uint64_t sim_now_ms(const struct sim *s);
uint64_t sim_now_ns(const struct sim *s);
/* The wall clock that all nodes have; it is set forward or back by so much. Monotonic time goes on. */
uint64_t sim_unix_ns(const struct sim *s);
void sim_step_clock(struct sim *s, int64_t ns);
int sim_turn(const struct sim *s); /* node of the loop whose code runs now; -1: none does */

/* The node loses power: its disk keeps what was durable (and, by seed, parts of what was not); its
 * connections break; every pending and later operation of its old loops ends with -EIO without effect, so
 * that the code above can be stopped and freed. After that new loops of the node see the disk as it was left.
 */
void sim_crash(struct sim *s, unsigned node);
/* Changes that the node's disk has seen (writes, syncs, lengths, names), and how many units would be lost at
 * most if it crashed now. */
/* Bytes of data that arrive at either end of any connection are counted while it is on. */
void sim_count_traffic(struct sim *s, bool on);
uint64_t sim_traffic(const struct sim *s);    /* counted so far */
uint64_t sim_operations(const struct sim *s); /* of all disks, so far */
uint64_t sim_changes(struct sim *s, unsigned node);
uint64_t sim_unsynced(struct sim *s, unsigned node);
/* The folder tree of a node's disk, for tests: reads a file as it would be found after a clean stop, or now.
 * malloc'ed. */
must_check int sim_file(struct sim *s, unsigned node, const char *path, bool durable_only, uint8_t **p,
                        size_t *n);
/* Damages a byte of a file on a node's disk. */
must_check int sim_flip(struct sim *s, unsigned node, const char *path, uint64_t offset, uint8_t mask);

#endif
