/* SPDX-License-Identifier: Apache-2.0 */
/* Every size that bytes from outside may ask for is checked against one of these before memory is taken. */
#ifndef LARDER_LIMITS_H
#define LARDER_LIMITS_H

#define BLOCK_BYTES           4096u      /* border of everything in a segment */
#define CHUNK_PLAIN_BYTES_MAX (4u << 20) /* plaintext of one chunk */
#define CHUNK_STORED_BYTES_MAX \
    (CHUNK_PLAIN_BYTES_MAX + 4096u)        /* codec header and tag on top of a raw chunk */
#define SEGMENT_CHUNKS_MAX      (4u << 20) /* 16 TiB of plaintext in one segment */
#define SEGMENT_BYTES_MAX       (1ull << 44)
#define INDEX_BYTES_MAX         (512u << 20) /* public and sealed part together */
#define TENSORS_MAX             (4u << 20)   /* in one part */
#define TENSOR_NAME_BYTES_MAX   4096u
#define TENSOR_DIMS_MAX         16u
#define BLOBS_MAX               4096u /* in one part */
#define NAME_BYTES_MAX          255u  /* runs, datasets, shards, labels' keys */
#define LABELS_BYTES_MAX        4096u /* labels of one commit, encoded */
#define LOADER_STATE_BYTES_MAX  64u
#define TENANT_NAME_BYTES_MAX   63u    /* [a-z0-9][a-z0-9-]* */
#define WORLD_MAX               65536u /* parts of one commit */
#define COMMIT_BYTES_MAX        (16u << 20)
#define ENVELOPES_MAX           64u /* KEK epochs under which one run's key is wrapped at once */
#define FRAME_PAYLOAD_BYTES_MAX (CHUNK_STORED_BYTES_MAX + 1024u)
#define FRAME_CONTROL_BYTES_MAX (1u << 20) /* payload of a frame that carries no chunk */
#define READ_RANGES_MAX         4096u      /* ranges in one read */
#define LIST_ITEMS_MAX          1024u      /* entries in one page of a listing */
#define SAMPLE_FIELDS_MAX       1024u      /* of one sample */

#endif
