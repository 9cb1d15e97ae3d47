/* nccl_ep.h: expert-parallel dispatch and combine, in C.
 *
 * A group is one rank's part of a world of ranks. A handle holds the routing of one dispatch: which tokens went to
 * which expert. ncclEpDispatch sends every token to the ranks of its experts, ncclEpCombine brings the experts' rows
 * home. There are two algorithms, with the same results bit for bit: low latency, for the few tokens of decoding, and
 * high throughput, for the thousands of training and prefill. docs/c_api.md compares this API with that of NCCL EP;
 * docs/semantics.md says what the operations promise.
 *
 * Every struct begins with size, magic and version, and is filled by its NCCL_EP_*_INIT macro:
 *     ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
 * Structs only grow at their end. A smaller struct (of an older header) is served, its missing fields are as INIT
 * leaves them; a larger one is served if what this library does not know is zero, and refused otherwise. So is a config
 * whose `reserved` is not zero.
 *
 * Every function but the two that return text returns a result and never throws, exits or aborts; ncclEpGetLastError()
 * has the sentence with the values. A refused call has changed nothing. A group and its handles may be used by one
 * thread at a time. But while one is in an operation, another may call ncclEpGroupDestroy, which ends a wait on the CPU
 * at once in NCCL_EP_INVALID_USAGE, and ncclEpGroupSetTimeout, which the wait obeys. A flag is 0 or 1.
 *
 * A group or a handle that was destroyed, was never made, or is of the other kind is NCCL_EP_INVALID_ARGUMENT. It is
 * known by its address: one that a new object of the kind has got is that object.
 *
 * Memory: inputs and outputs are the caller's, on the group's device. On the CPU an operation is done when its call
 * returns. On CUDA it is done when its stream has come so far; until then tensors must stay.
 *
 * Streams: all operations of a group, of all its handles, go to one stream, or to streams that events order as the
 * calls are. They share the group's window, and the library does not order them. */
#ifndef NCCL_EP_H_
#define NCCL_EP_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define NCCL_EP_MAJOR 0
#define NCCL_EP_MINOR 3
#define NCCL_EP_PATCH 0
#define NCCL_EP_VERSION (NCCL_EP_MAJOR * 10000 + NCCL_EP_MINOR * 100 + NCCL_EP_PATCH)

#define NCCL_EP_MAGIC 0x4E434550u
#define NCCL_EP_HEAD(type) sizeof(type), NCCL_EP_MAGIC, NCCL_EP_VERSION

#if defined(__GNUC__)
#define NCCL_EP_API __attribute__((visibility("default")))
#else
#define NCCL_EP_API
#endif

/* ---- Numbers with names. The types are int32_t, so that their size is the same for every compiler. ---- */

typedef int32_t ncclEpResult_t;
enum {
  NCCL_EP_SUCCESS = 0,
  NCCL_EP_INVALID_ARGUMENT = 1, /* a tensor, size or option that cannot be served */
  NCCL_EP_INVALID_USAGE = 2,    /* right arguments at the wrong time */
  NCCL_EP_TIMEOUT = 3,          /* a rank was not heard of within the deadline; the group has failed */
  NCCL_EP_MISMATCH = 4,         /* the ranks disagree about the group, or about a call (then the group has failed) */
  NCCL_EP_SYSTEM_ERROR = 5,     /* the operating system, CUDA or NCCL refused */
  NCCL_EP_NOT_SUPPORTED = 6,    /* not in this build, or not yet */
  NCCL_EP_OVERFLOW = 7          /* NCCL_EP_OVERFLOW_ERROR: rows did not fit; those that did are there */
};

/* Of a group: what it has room for, AUTO is both. Of a handle: what its operations use; AUTO is what the group has, and
 * of both low latency up to ncclEpGroupInfo_t.ll_max_tokens. */
typedef int32_t ncclEpAlgorithm_t;
enum { NCCL_EP_ALGORITHM_AUTO = 0, NCCL_EP_ALGORITHM_LOW_LATENCY = 1, NCCL_EP_ALGORITHM_HIGH_THROUGHPUT = 2 };

/* What is received. R ranks, L experts on a rank, M max_tokens, K top-k, H elements of a row.
 * expert_major: [L, capacity, H]. packed: [capacity, H], expert after expert, each start a multiple of
 * expert_alignment. rank_major: [R, M, H]. flat: [capacity, H], by (source rank, token); one row for all the experts
 * here of a token. */
typedef int32_t ncclEpLayout_t;
enum {
  NCCL_EP_LAYOUT_UNSET = 0,
  NCCL_EP_LAYOUT_EXPERT_MAJOR = 1,
  NCCL_EP_LAYOUT_PACKED = 2,
  NCCL_EP_LAYOUT_RANK_MAJOR = 3,
  NCCL_EP_LAYOUT_FLAT = 4
};

/* The values of ncclDataType_t. Rows of other types than the four floats of 32 bits and less travel bit for bit. */
typedef int32_t ncclEpDataType_t;
enum {
  NCCL_EP_DTYPE_AUTO = -1,
  NCCL_EP_INT8 = 0,
  NCCL_EP_UINT8 = 1,
  NCCL_EP_INT32 = 2,
  NCCL_EP_UINT32 = 3,
  NCCL_EP_INT64 = 4,
  NCCL_EP_UINT64 = 5,
  NCCL_EP_FLOAT16 = 6,
  NCCL_EP_FLOAT32 = 7,
  NCCL_EP_FLOAT64 = 8,
  NCCL_EP_BFLOAT16 = 9,
  NCCL_EP_FLOAT8_E4M3 = 10,
  NCCL_EP_FLOAT8_E5M2 = 11,
  NCCL_EP_LOGFMT = 100 /* of no tensor: wire_dtype of a combine */
};

/* What dispatch does to bf16 or fp16 rows: e4m3 with a scale for 128 elements, amax / 448 as fp32, the same rounded up
 * to a power of two, or the exponents of that, four in an int32. */
typedef int32_t ncclEpQuant_t;
enum { NCCL_EP_QUANT_NONE = 0, NCCL_EP_QUANT_FP8 = 1, NCCL_EP_QUANT_FP8_ROUNDED = 2, NCCL_EP_QUANT_FP8_UE8M0 = 3 };

/* Who weights the experts' rows. Rows of rank_major and flat are always the caller's sum over its experts, weighted by
 * it: there DISPATCH and NONE mean the same, and HOME is refused. */
typedef int32_t ncclEpWeights_t;
enum {
  NCCL_EP_WEIGHTS_DISPATCH = 0, /* the library, with the weights of the dispatch */
  NCCL_EP_WEIGHTS_NONE = 1,     /* nobody, or the caller has */
  NCCL_EP_WEIGHTS_HOME = 2      /* the library, with ncclEpCombineInputs_t.topk_weights of the tokens' home rank */
};

typedef int32_t ncclEpOverflowPolicy_t;
enum {
  NCCL_EP_OVERFLOW_COUNT = 0, /* rows past a capacity are dropped and counted */
  NCCL_EP_OVERFLOW_ERROR = 1  /* the same, and NCCL_EP_OVERFLOW: of the dispatch on the CPU, of ncclEpCheck on CUDA */
};

/* ---- Errors and version ---- */

NCCL_EP_API ncclEpResult_t ncclEpGetVersion(int* version); /* NCCL_EP_VERSION of the library in use */
NCCL_EP_API const char* ncclEpGetErrorString(ncclEpResult_t result);
/* What the last failed call of this thread said; "" if there was none. Valid until the next failed call. */
NCCL_EP_API const char* ncclEpGetLastError(void);

/* ---- Tensors ---- */

#define NCCL_EP_MAX_DIMS 4

/* A tensor in memory of the caller. Strides count elements; all zero means contiguous, and all tensors must be
 * contiguous, but for the scales that a dispatch is given. */
typedef struct {
  size_t size;
  uint32_t magic, version;
  int32_t ndim; /* 0: there is none */
  ncclEpDataType_t dtype;
  void* data; /* null is allowed where the tensor has no elements */
  int64_t sizes[NCCL_EP_MAX_DIMS];
  int64_t strides[NCCL_EP_MAX_DIMS];
} ncclEpTensor_t;
#define NCCL_EP_TENSOR_INIT                                                                 \
  {                                                                                         \
    NCCL_EP_HEAD(ncclEpTensor_t), 0, NCCL_EP_DTYPE_AUTO, NULL, {0, 0, 0, 0}, { 0, 0, 0, 0 } \
  }

NCCL_EP_API ncclEpResult_t ncclEpTensorBytes(const ncclEpTensor_t* tensor, size_t* bytes); /* of a contiguous one */

/* ---- Groups ---- */

typedef struct ncclEpGroup* ncclEpGroup_t;
/* How low latency crosses between domains of GPUs: a row to a domain once, to a rank that hands it out there, or to
 * each rank itself. AUTO takes the latter with enable_mask, and where a rank has at most 64 KiB of rows to send and the
 * other domains have at most 8 ranks. Results are the same to the bit. */
typedef int32_t ncclEpLlNetwork_t;
enum { NCCL_EP_LL_NETWORK_AUTO = 0, NCCL_EP_LL_NETWORK_RAIL = 1, NCCL_EP_LL_NETWORK_MESH = 2 };

struct ncclComm; /* ncclComm_t is a pointer to it */

#define NCCL_EP_DEVICE_CPU (-1)

/* The same on all ranks, but for device, timeout_ns and overflow_policy. */
typedef struct {
  size_t size;
  uint32_t magic, version;
  ncclEpAlgorithm_t algorithm;
  int32_t device; /* ordinal of a CUDA device, or NCCL_EP_DEVICE_CPU */
  int32_t num_experts;
  int32_t max_tokens; /* that a rank dispatches at once */
  int32_t topk;
  int32_t domain_size;          /* claimed topology: ranks that share memory, consecutive ones. 0: all */
  size_t max_token_bytes;       /* of a dispatched row; with scales or extra tensors the sum, each rounded up to 16 */
  size_t max_combine_row_bytes; /* of a row on its way home, H times the wire type's size. 0: as max_token_bytes */
  uint64_t timeout_ns;          /* of every wait for another rank, at most 10^18. 0: 100 s */
  ncclEpOverflowPolicy_t overflow_policy;
  int32_t max_num_sms;  /* of an operation that names none. 0: the library's choice */
  uint64_t arena_bytes; /* high throughput: of shared memory for ncclEpMemAlloc. 0: none */
  int32_t enable_mask;  /* low latency: a rank that is late is masked ("Masks" below), and the group does not fail. 0:
                           it fails */
  ncclEpLlNetwork_t ll_network;
} ncclEpGroupConfig_t;
#define NCCL_EP_GROUP_CONFIG_INIT \
  { NCCL_EP_HEAD(ncclEpGroupConfig_t), 0, NCCL_EP_DEVICE_CPU, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }

/* How ranks find one another: puts `bytes` bytes of every rank, in rank order, into `all`, or returns another result
 * than NCCL_EP_SUCCESS (NCCL_EP_TIMEOUT: after timeout_ns). Called by ncclEpCreateGroupFromCallback and ncclEpMaskClean
 * only, in the same order on all ranks: with enable_mask it and its context must stay until the group is destroyed.
 * MPI_Allgather(mine, bytes, MPI_BYTE, all, bytes, MPI_BYTE, comm) does it. */
typedef ncclEpResult_t (*ncclEpAllgather_t)(void* context, const void* mine, void* all, size_t bytes,
                                            uint64_t timeout_ns);

/* Collective. `allgather` may be null in a world of one rank. */
NCCL_EP_API ncclEpResult_t ncclEpCreateGroupFromCallback(ncclEpGroup_t* group, int rank, int num_ranks,
                                                         ncclEpAllgather_t allgather, void* context,
                                                         const ncclEpGroupConfig_t* config);
/* Collective: the ranks of an NCCL communicator, whose GPU is `device` of the config. It is used, and must be idle,
 * while groups are made of it or their masks are cleaned, and lives on as long as they do. Builds without CUDA:
 * NCCL_EP_NOT_SUPPORTED. */
NCCL_EP_API ncclEpResult_t ncclEpCreateGroup(ncclEpGroup_t* group, struct ncclComm* comm,
                                             const ncclEpGroupConfig_t* config);
/* Waits for no other rank longer than the deadline. Handles that are left can only be destroyed. Null is allowed. */
NCCL_EP_API ncclEpResult_t ncclEpGroupDestroy(ncclEpGroup_t group);

NCCL_EP_API ncclEpResult_t ncclEpGroupSetTimeout(ncclEpGroup_t group, uint64_t timeout_ns);
/* Returns what the device has found: the failure of the group (every time), expert ids out of range and, with
 * NCCL_EP_OVERFLOW_ERROR, dropped rows (once). On CUDA it waits for a small copy, not for the caller's streams. */
NCCL_EP_API ncclEpResult_t ncclEpCheck(ncclEpGroup_t group);

typedef struct {
  size_t size;
  uint32_t magic, version;
  int32_t rank, num_ranks, domain_size;
  ncclEpAlgorithm_t algorithm;           /* what there is room for */
  uint64_t window_bytes;                 /* of memory that the ranks share */
  uint64_t num_dispatches, num_combines; /* of low latency, that were finished */
  uint64_t dropped_rows;
  uint64_t num_ht_dispatches, num_ht_combines; /* of high throughput; every ncclEpRouteHandle counts as a dispatch */
  uint64_t num_staged_dispatches; /* of them, those that copied rows: an output was not of ncclEpMemAlloc */
  uint64_t num_staged_combines;   /* the same of rank_major's and flat's input, or it was of a wider type
                                     than the wire */
  uint64_t arena_bytes, arena_free_bytes;
  int32_t ll_max_tokens; /* room of low latency, in tokens of a handle. 0: none */
  int32_t reserved;
} ncclEpGroupInfo_t;
#define NCCL_EP_GROUP_INFO_INIT \
  { NCCL_EP_HEAD(ncclEpGroupInfo_t), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
NCCL_EP_API ncclEpResult_t ncclEpGroupGetInfo(ncclEpGroup_t group, ncclEpGroupInfo_t* info);

/* Memory on the group's device, aligned to 64 bytes at least, out of its arena: there the ranks write the outputs of a
 * high-throughput dispatch where they stay, and read a combine's input (rank_major, flat) where it lies. Other memory
 * works as well and costs a copy; so does what this returns once the arena is full. Free it when the operations that
 * use it are done, or all that will use it are on one stream. What is left goes with the group. */
NCCL_EP_API ncclEpResult_t ncclEpMemAlloc(ncclEpGroup_t group, void** memory, size_t bytes);
/* Null is allowed. */
NCCL_EP_API ncclEpResult_t ncclEpMemFree(ncclEpGroup_t group, void* memory);

/* ---- Masks ----
 *
 * A group of enable_mask, of at most 64 ranks (CPU ranks: in one domain), goes on in low latency without the ranks that
 * it has masked: nothing is sent to them, no token of theirs is received, and their experts count for nothing in
 * combine. A rank masks those that miss a deadline (timeout_ns), and those that its caller names. Masks are each rank's
 * own; who is masked learns of it in its next operation, and masks that rank in return. High throughput has no masks:
 * there a late rank fails the group as ever. Of a group without enable_mask all three are NCCL_EP_INVALID_USAGE. */

/* masked: int32 [num_ranks] on the group's device, 1 for a masked rank, else 0. In the order of the stream; a CUDA
 * graph may hold it. */
NCCL_EP_API ncclEpResult_t ncclEpMaskQuery(ncclEpGroup_t group, const ncclEpTensor_t* masked, void* stream);
/* Masks a rank, another one than this, for the operations that follow in the order of the stream. */
NCCL_EP_API ncclEpResult_t ncclEpMaskUpdate(ncclEpGroup_t group, int rank, void* stream);
/* Collective, of all ranks, masked ones too: unmasks all. Ranks do not come back one by one. Waits for the operations
 * in flight and for the other ranks, four deadlines at most; through the callback, or the communicator, of the group's
 * creation. Refused while a split call is open. Handles keep their sizes; what was dispatched before must not
 * be combined afterwards. NCCL_EP_TIMEOUT, if ranks did not come: no later call succeeds, and if other ranks may have
 * gone on, the group is of no use any more. */
NCCL_EP_API ncclEpResult_t ncclEpMaskClean(ncclEpGroup_t group);

/* ---- Handles ---- */

typedef struct ncclEpHandle* ncclEpHandle_t;

/* packed and flat of high throughput: outputs of exactly the rows that come, known after ncclEpRouteHandle. */
#define NCCL_EP_CAPACITY_EXACT (-1)

typedef struct {
  size_t size;
  uint32_t magic, version;
  ncclEpLayout_t layout;
  int32_t topk;             /* choices of a token. 0: the group's */
  int64_t capacity;         /* rows of an expert (expert_major), or in all (packed, flat). 0: what always fits, as long
                               as no token names an expert twice (expert_major of high throughput needs a number).
                               rank_major: 0 */
  int32_t expert_alignment; /* packed. 0: 1 */
  ncclEpAlgorithm_t algorithm;
  int32_t max_tokens; /* that a rank dispatches at once with it, the same on all ranks. 0: the group's */
  int32_t reserved;
} ncclEpHandleConfig_t;
#define NCCL_EP_HANDLE_CONFIG_INIT \
  { NCCL_EP_HEAD(ncclEpHandleConfig_t), 0, 0, 0, 0, 0, 0, 0 }

/* Bytes of device memory that a handle needs. */
NCCL_EP_API ncclEpResult_t ncclEpHandleMemSize(ncclEpGroup_t group, const ncclEpHandleConfig_t* config, size_t* bytes);
/* Not collective. handle_mem: of that size, aligned to 16 bytes, the caller's until the handle is destroyed; null: the
 * library allocates it. */
NCCL_EP_API ncclEpResult_t ncclEpInitHandle(ncclEpHandle_t* handle, ncclEpGroup_t group,
                                            const ncclEpHandleConfig_t* config, void* handle_mem);
/* The expert ids of the next dispatches: [T, K] int64 or int32, T up to max_tokens, -1 for no choice. Stores the
 * address only: the ids are read by ncclEpDispatch, or ncclEpRouteHandle. An id out of range counts as -1, and
 * ncclEpCheck tells. */
NCCL_EP_API ncclEpResult_t ncclEpUpdateHandle(ncclEpHandle_t handle, const ncclEpTensor_t* topk_idx);
/* High throughput, collective: the ranks learn what each sends to each. Fills `info` (int32, NCCL_EP_INFO_SIZE or
 * NCCL_EP_INFO_SIZE_PACKED), and the dispatches that follow send along these routes, any number of them, until the next
 * ncclEpUpdateHandle. Without it every dispatch routes by itself, in one operation. A handle of NCCL_EP_CAPACITY_EXACT
 * needs it: then it waits for the counts, and ncclEpDispatchShapes has the sizes. The rows of the dispatch before
 * cannot be combined afterwards. */
NCCL_EP_API ncclEpResult_t ncclEpRouteHandle(ncclEpHandle_t handle, const ncclEpTensor_t* info, void* stream);
/* ncclEpInitHandle and ncclEpUpdateHandle. */
NCCL_EP_API ncclEpResult_t ncclEpCreateHandle(ncclEpHandle_t* handle, ncclEpGroup_t group,
                                              const ncclEpHandleConfig_t* config, const ncclEpTensor_t* topk_idx,
                                              void* handle_mem);
/* Refused while a split call of a usable group is open. Null is allowed. */
NCCL_EP_API ncclEpResult_t ncclEpHandleDestroy(ncclEpHandle_t handle);

typedef struct {
  size_t size;
  uint32_t magic, version;
  ncclEpLayout_t layout;
  int32_t topk, max_tokens, expert_alignment;
  ncclEpAlgorithm_t algorithm; /* that was taken */
  int32_t reserved;
  int64_t capacity; /* rows as in ncclEpHandleConfig_t, rank_major: max_tokens; NCCL_EP_CAPACITY_EXACT until they are
                       known */
} ncclEpHandleInfo_t;
#define NCCL_EP_HANDLE_INFO_INIT \
  { NCCL_EP_HEAD(ncclEpHandleInfo_t), 0, 0, 0, 0, 0, 0, 0 }
NCCL_EP_API ncclEpResult_t ncclEpHandleGetInfo(ncclEpHandle_t handle, ncclEpHandleInfo_t* info);

/* ---- Dispatch ---- */

#define NCCL_EP_MAX_EXTRA 3

typedef struct {
  size_t size;
  uint32_t magic, version;
  const ncclEpTensor_t* tokens;       /* [T, H], aligned and rows a multiple of 16 bytes */
  const ncclEpTensor_t* topk_weights; /* [T, K] float32. Null: ones */
  const ncclEpTensor_t* scales; /* [T, S] of rows that the caller has quantised, any type and strides. Null: none */
  const ncclEpTensor_t* extra[NCCL_EP_MAX_EXTRA]; /* more tensors [T, n] on the same routes, of any type, as
                                                         `tokens` aligned. Null: none. Low latency: the first travels in
                                                         the rows of tokens where these have no scales, each other one
                                                         in an operation of its own, which send_only has not */
} ncclEpDispatchInputs_t;
#define NCCL_EP_DISPATCH_INPUTS_INIT                                             \
  {                                                                              \
    NCCL_EP_HEAD(ncclEpDispatchInputs_t), NULL, NULL, NULL, { NULL, NULL, NULL } \
  }

/* "rows" stands for the leading sizes of the layout, [L, capacity], [capacity] or [R, M]. ncclEpDispatchShapes fills
 * them in, but for the data. A tensor that the layout or the call has not got is null or of ndim 0. */
typedef struct {
  size_t size;
  uint32_t magic, version;
  ncclEpTensor_t* tokens;       /* [rows, H] */
  ncclEpTensor_t* scales;       /* [rows, S], with quant or with scales given */
  ncclEpTensor_t* topk_weights; /* expert layouts [rows], else [rows, K], float32; 0 where there is no row or choice */
  ncclEpTensor_t* topk_idx;     /* rank_major, flat: [rows, K] local expert ids or -1, of the type of the ids given */
  ncclEpTensor_t* row_expert;   /* packed: [rows] int32, -1 is padding */
  ncclEpTensor_t* info;         /* int32, all of NCCL_EP_INFO_*; after ncclEpRouteHandle, which has filled it: none */
  ncclEpTensor_t* extra[NCCL_EP_MAX_EXTRA]; /* [rows, n] of the inputs' */
} ncclEpDispatchOutputs_t;
#define NCCL_EP_DISPATCH_OUTPUTS_INIT                                                               \
  {                                                                                                 \
    NCCL_EP_HEAD(ncclEpDispatchOutputs_t), NULL, NULL, NULL, NULL, NULL, NULL, { NULL, NULL, NULL } \
  }

/* Where things begin in info. num_bins: L in the expert layouts, R in the others. */
#define NCCL_EP_INFO_COUNTS(num_bins) 0                     /* [bins] rows in the tensor */
#define NCCL_EP_INFO_DEMAND(num_bins) (num_bins)            /* [bins] rows that there would be without a capacity */
#define NCCL_EP_INFO_OVERFLOW(num_bins) (2 * (num_bins))    /* [1] rows that were dropped */
#define NCCL_EP_INFO_TOTAL(num_bins) (2 * (num_bins) + 1)   /* [1] sum of the counts */
#define NCCL_EP_INFO_OFFSETS(num_bins) (2 * (num_bins) + 2) /* packed: [L + 1] starts of the experts, and the end */
#define NCCL_EP_INFO_SIZE(num_bins) (2 * (num_bins) + 2)
#define NCCL_EP_INFO_SIZE_PACKED(num_bins) (3 * (num_bins) + 3)

typedef struct {
  size_t size;
  uint32_t magic, version;
  int32_t send_only; /* low latency: the sending phase; ncclEpComplete is the other */
  ncclEpQuant_t quant;
  int32_t zero_padding; /* rows that do not exist are zero; otherwise their content is unspecified */
  int32_t num_sms;      /* the same on all ranks; 0: as the group */
  int32_t cached;       /* high throughput: other tensors along the routes of the handle's last dispatch, to the same
                           rows. Tokens, scales and extra tensors only: what else that dispatch gave stays as it was */
  int32_t reserved;
} ncclEpDispatchConfig_t;
#define NCCL_EP_DISPATCH_CONFIG_INIT \
  { NCCL_EP_HEAD(ncclEpDispatchConfig_t), 0, 0, 0, 0, 0, 0 }

/* Fills in ndim, dtype and sizes of the output tensors that are not null; tells ndim 0 of those that there are not. Of
 * the inputs only types and sizes count. topk_idx is int64 until ncclEpUpdateHandle has seen int32 ids. */
NCCL_EP_API ncclEpResult_t ncclEpDispatchShapes(ncclEpHandle_t handle, const ncclEpDispatchInputs_t* inputs,
                                                const ncclEpDispatchConfig_t* config,
                                                const ncclEpDispatchOutputs_t* outputs);
/* Collective. stream: a cudaStream_t, ignored on the CPU. With send_only the outputs must stay until ncclEpComplete. */
NCCL_EP_API ncclEpResult_t ncclEpDispatch(ncclEpHandle_t handle, const ncclEpDispatchInputs_t* inputs,
                                          const ncclEpDispatchOutputs_t* outputs, const ncclEpDispatchConfig_t* config,
                                          void* stream);

/* ---- Combine ---- */

typedef struct {
  size_t size;
  uint32_t magic, version;
  const ncclEpTensor_t* tokens;       /* bf16, fp16 or fp32, of the sizes of the dispatch's output (H may differ) */
  const ncclEpTensor_t* topk_weights; /* NCCL_EP_WEIGHTS_HOME: [T, K] float32 */
  const ncclEpTensor_t* topk_idx;     /* NCCL_EP_WEIGHTS_HOME, optional: [T, K]; where it is -1, that row is left out */
  const ncclEpTensor_t* bias0;        /* flat, optional: [T, H] of the output's type, added first */
  const ncclEpTensor_t* bias1;        /* flat, optional, the same */
  const ncclEpTensor_t* values;       /* high throughput, optional: as ncclEpCombineWeights has them, beside the rows */
  /* send_only, expert_major, NCCL_EP_WEIGHTS_HOME, all types alike, optional: int32 [L, ceil(C / rows_per_signal)], by
     which a kernel on another stream tells which blocks of the tokens' rows it has written. Other ranks need not. */
  const ncclEpTensor_t* row_signals;
} ncclEpCombineInputs_t;
#define NCCL_EP_COMBINE_INPUTS_INIT \
  { NCCL_EP_HEAD(ncclEpCombineInputs_t), NULL, NULL, NULL, NULL, NULL, NULL, NULL }

typedef struct {
  size_t size;
  uint32_t magic, version;
  ncclEpTensor_t* tokens; /* [T, H] bf16, fp16 or fp32, T of the dispatch */
  ncclEpTensor_t* values; /* [T, K] float32, with the inputs' values */
} ncclEpCombineOutputs_t;
#define NCCL_EP_COMBINE_OUTPUTS_INIT \
  { NCCL_EP_HEAD(ncclEpCombineOutputs_t), NULL, NULL }

typedef struct {
  size_t size;
  uint32_t magic, version;
  int32_t send_only; /* low latency */
  ncclEpWeights_t weights;
  /* Of partial sums on their way home: the output's type (AUTO), float32, or, for rows and outputs that are both bf16
     or both fp16, H a multiple of 16: NCCL_EP_FLOAT8_E4M3 (e4m3 with a scale for 128 elements), NCCL_EP_LOGFMT. Outputs
     are of the rows' type, or float32. */
  ncclEpDataType_t wire_dtype;
  int32_t num_sms;          /* the same on all ranks; 0: as the group */
  int32_t rows_per_signal;  /* row_signals: rows of a row block */
  int32_t signal_threshold; /* a row block is written when its signal is at least this, from 1 on */
  double scale; /* a token's sum is multiplied by it, in float32, before the biases are added. 0 stands for 1 */
} ncclEpCombineConfig_t;
#define NCCL_EP_COMBINE_CONFIG_INIT \
  { NCCL_EP_HEAD(ncclEpCombineConfig_t), 0, 0, NCCL_EP_DTYPE_AUTO, 0, 0, 0, 0 }

/* Collective, after a dispatch with this handle, any number of times. */
NCCL_EP_API ncclEpResult_t ncclEpCombine(ncclEpHandle_t handle, const ncclEpCombineInputs_t* inputs,
                                         const ncclEpCombineOutputs_t* outputs, const ncclEpCombineConfig_t* config,
                                         void* stream);

/* Collective. Brings one float32 for each row home: values [rows], or [rows, K] in rank_major and flat; out [T, K], 0
 * where there is no row. The way of the weights' gradients. */
NCCL_EP_API ncclEpResult_t ncclEpCombineWeights(ncclEpHandle_t handle, const ncclEpTensor_t* values,
                                                const ncclEpTensor_t* out, void* stream);

/* ---- The receive of what was sent with send_only ---- */

typedef struct {
  size_t size;
  uint32_t magic, version;
} ncclEpCompleteConfig_t;
#define NCCL_EP_COMPLETE_CONFIG_INIT \
  { NCCL_EP_HEAD(ncclEpCompleteConfig_t) }

/* config may be null, as the configs of dispatch and combine may. */
NCCL_EP_API ncclEpResult_t ncclEpComplete(ncclEpHandle_t handle, const ncclEpCompleteConfig_t* config, void* stream);

#ifdef __cplusplus
}
#endif

#endif /* NCCL_EP_H_ */
