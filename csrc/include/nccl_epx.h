/* nccl_epx.h: what this library can do beyond the API of nccl_ep.h, which has the objects, the tensors and the structs
 * that both use. Structs of an `ncclEpx` function stand beside those of the `ncclEp` function of the same name; null is
 * allowed for each, and then both functions do the same.
 *
 * A group and its handles may be used by one thread at a time. But while one is in an operation, another may call
 * ncclEpGroupDestroy, which ends a wait on the CPU at once in ncclInvalidUsage, and ncclEpxGroupSetTimeout, which the
 * wait obeys. A group or a handle that was destroyed, was never made, or is of the other kind is ncclInvalidArgument.
 * It is known by its address: one that a new object of the kind has got is that object.
 *
 * On the CPU an operation is done when its call returns. On CUDA it is done when its stream has come so far; until then
 * tensors must stay. All operations of a group, of all its handles, go to one stream, or to streams that events order
 * as the calls are.
 *
 * In the comments: as in nccl_ep.h. Flags are 0 or 1. */
#ifndef NCCL_EPX_H_
#define NCCL_EPX_H_

#include "nccl_ep.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NCCL_EPX_MAJOR 0
#define NCCL_EPX_MINOR 3
#define NCCL_EPX_PATCH 0
#define NCCL_EPX_VERSION (NCCL_EPX_MAJOR * 10000 + NCCL_EPX_MINOR * 100 + NCCL_EPX_PATCH)

NCCL_EPX_API ncclResult_t ncclEpxGetVersion(int* version); /* NCCL_EPX_VERSION of the library in use */

/* ---- Errors ---- */

/* What an ncclResult_t cannot tell apart. */
typedef int32_t ncclEpxError_t;
enum {
  NCCL_EPX_NO_ERROR = 0,
  NCCL_EPX_INVALID_ARGUMENT = 1, /* ncclInvalidArgument: a tensor, size or option that cannot be served */
  NCCL_EPX_INVALID_USAGE = 2,    /* ncclInvalidUsage: right arguments at the wrong time */
  NCCL_EPX_TIMEOUT = 3,       /* ncclRemoteError: a rank was not heard of within the deadline; the group has failed */
  NCCL_EPX_MISMATCH = 4,      /* ncclInvalidUsage: ranks disagree about the group, or a call (then it has failed) */
  NCCL_EPX_SYSTEM_ERROR = 5,  /* ncclSystemError: the operating system, CUDA or NCCL refused */
  NCCL_EPX_NOT_SUPPORTED = 6, /* ncclInvalidArgument: not in this build */
  NCCL_EPX_OVERFLOW = 7       /* ncclInvalidUsage: rows did not fit; those that did are there */
};
/* Of the last failed call of this thread: its kind, and a sentence with the values, which is valid until the next
 * failed call; before the first NCCL_EPX_NO_ERROR and "". */
NCCL_EPX_API ncclEpxError_t ncclEpxGetLastErrorKind(void);
NCCL_EPX_API const char* ncclEpxGetLastError(void);
NCCL_EPX_API const char* ncclEpxGetErrorString(ncclEpxError_t kind);

/* ---- Tensors ---- */

#define NCCL_EPX_MAX_DIMS 4

NCCL_EPX_API ncclResult_t ncclEpxTensorBytes(const ncclEpTensor_t* tensor, size_t* bytes);

/* ---- Communicators without NCCL ---- */

#define NCCL_EPX_DEVICE_CPU (-1)

/* How ranks find one another: puts `bytes` bytes of every rank, in rank order, into `all`, or returns another number
 * than 0 (NCCL_EPX_TIMEOUT: after timeout_ns). Called by ncclEpCreateGroup, by ncclEpInitHandle where
 * it is collective, and by ncclEpMaskClean between NVLink domains, in the same order on all ranks. MPI_Allgather(mine,
 * bytes, MPI_BYTE, all, bytes, MPI_BYTE, comm) does it. */
typedef int32_t (*ncclEpxAllgather_t)(void* context, const void* mine, void* all, size_t bytes, uint64_t timeout_ns);

/* Ranks that are threads or processes of one machine, as a communicator for ncclEpCreateGroup and for nothing else: no
 * function of NCCL may see it. device: the ordinal of a CUDA device, or NCCL_EPX_DEVICE_CPU. `allgather` may be null in
 * a world of one rank; it and its context must stay as long as a group of the communicator. Not collective. */
NCCL_EPX_API ncclResult_t ncclEpxCommFromCallback(ncclComm_t* comm, int rank, int num_ranks, int device,
                                                  ncclEpxAllgather_t allgather, void* context);
/* Null is allowed. */
NCCL_EPX_API ncclResult_t ncclEpxCommDestroy(ncclComm_t comm);

/* ---- Groups ---- */

/* How LL crosses between domains of GPUs: a row to a domain once, to a rank that hands it out there, or to each rank
 * itself. AUTO takes the latter with enable_mask, and where a rank has at most 64 KiB of rows to send and the other
 * domains have at most 8 ranks. Results are the same to the bit. */
typedef int32_t ncclEpxLlNetwork_t;
enum { NCCL_EPX_LL_NETWORK_AUTO = 0, NCCL_EPX_LL_NETWORK_RAIL = 1, NCCL_EPX_LL_NETWORK_MESH = 2 };

/* What makes the memory that GPUs share: NCCL, or CUDA's virtual memory. The latter serves the GPUs of one machine and
 * needs no NCCL, whose communicator takes some 150 MB of a GPU. */
typedef int32_t ncclEpxWindow_t;
enum { NCCL_EPX_WINDOW_NCCL = 0, NCCL_EPX_WINDOW_CUMEM = 1 };

typedef struct {
  unsigned int size, magic;
  int32_t both_algorithms;      /* room for both, whatever the config's algorithm: a handle says which it uses */
  int32_t domain_size;          /* claimed topology: ranks that share memory, consecutive ones. 0: all */
  size_t max_combine_row_bytes; /* of a row on its way home, H times the wire type's size. 0: max_token_bytes */
  uint64_t arena_bytes;         /* HT: of shared memory for ncclEpxMemAlloc. 0: none */
  ncclEpxLlNetwork_t ll_network;
  ncclEpxWindow_t window; /* of groups on GPUs */
} ncclEpxGroupOptions_t;
#define NCCL_EPX_GROUP_OPTIONS_INIT NCCL_EP_STRUCT_INIT(ncclEpxGroupOptions_t, NCCL_EP_MAGIC)

NCCL_EPX_API ncclResult_t ncclEpxCreateGroup(ncclEpGroup_t* ep_group, ncclComm_t comm,
                                             const ncclEpGroupConfig_t* config, const ncclEpxGroupOptions_t* options);

NCCL_EPX_API ncclResult_t ncclEpxGroupSetTimeout(ncclEpGroup_t ep_group, uint64_t timeout_ns);
/* Returns what the device has found: the failure of the group (every time), expert ids out of range and, unless the
 * policy is DROP, dropped rows (once). On CUDA it waits for a small copy, not for the caller's streams. */
NCCL_EPX_API ncclResult_t ncclEpxCheck(ncclEpGroup_t ep_group);

/* AUTO of a handle is what the group has, and of both LL up to ncclEpxGroupInfo_t.ll_max_tokens. */
typedef int32_t ncclEpxAlgorithm_t;
enum { NCCL_EPX_ALGORITHM_AUTO = 0, NCCL_EPX_ALGORITHM_LOW_LATENCY = 1, NCCL_EPX_ALGORITHM_HIGH_THROUGHPUT = 2 };

typedef struct {
  unsigned int size, magic;
  int32_t rank, num_ranks, domain_size;
  ncclEpxAlgorithm_t algorithm;          /* what there is room for; AUTO: both */
  uint64_t window_bytes;                 /* of memory that the ranks share */
  uint64_t num_dispatches, num_combines; /* of LL, that were finished */
  uint64_t dropped_rows;
  uint64_t num_ht_dispatches, num_ht_combines; /* of HT; every routing by itself counts as a dispatch */
  uint64_t num_staged_dispatches; /* of them, those that copied rows: an output was not of ncclEpxMemAlloc */
  uint64_t num_staged_combines;   /* the same of rank_major's and flat's input, or it was of a wider type than the
                                     wire */
  uint64_t arena_bytes, arena_free_bytes;
  int32_t ll_max_tokens; /* room of LL, in tokens of a handle. 0: none */
  int32_t topk;          /* room for so many choices of a token */
} ncclEpxGroupInfo_t;
#define NCCL_EPX_GROUP_INFO_INIT NCCL_EP_STRUCT_INIT(ncclEpxGroupInfo_t, NCCL_EP_MAGIC)
NCCL_EPX_API ncclResult_t ncclEpxGroupGetInfo(ncclEpGroup_t ep_group, ncclEpxGroupInfo_t* info);

/* Memory on the group's device, aligned to 64 bytes at least, out of its arena: there the ranks write the outputs of a
 * dispatch of HT where they stay, and read a combine's input (rank_major, flat) where it lies. Other memory works as
 * well and costs a copy; so does what this returns once the arena is full. Free it when the operations that use it are
 * done, or all that will use it are on one stream. What is left goes with the group. */
NCCL_EPX_API ncclResult_t ncclEpxMemAlloc(ncclEpGroup_t ep_group, void** memory, size_t bytes);
/* Null is allowed. */
NCCL_EPX_API ncclResult_t ncclEpxMemFree(ncclEpGroup_t ep_group, void* memory);

/* ---- Handles ---- */

/* All four in both algorithms. expert_major: [L, capacity, H]. packed: [capacity, H], expert after expert, each start a
 * multiple of the alignment. rank_major: [R, B, H]. flat: [capacity, H], by (source rank, token); one row for all the
 * experts here of a token. */
typedef int32_t ncclEpxLayout_t;
enum {
  NCCL_EPX_LAYOUT_EXPERT_MAJOR = 1,
  NCCL_EPX_LAYOUT_PACKED = 2,
  NCCL_EPX_LAYOUT_RANK_MAJOR = 3,
  NCCL_EPX_LAYOUT_FLAT = 4
};

/* packed and flat of HT: outputs of exactly the rows that come, known after ncclEpxRouteHandle. */
#define NCCL_EPX_CAPACITY_EXACT (-1)

/* A handle that is made with options has the layout, and the outputs, that they say: the argument `layout` is
 * NCCL_EP_LAYOUT_UNSET then, the alignment of its config may be any number, and ncclEpxDispatchShapes tells what the
 * outputs are, all of which a dispatch must be given. ncclEpUpdateHandle is not collective and fills no counters: every
 * dispatch of HT routes by itself, in one operation, or ncclEpxRouteHandle does. */
typedef struct {
  unsigned int size, magic;
  ncclEpxLayout_t layout;
  ncclEpxAlgorithm_t algorithm;
  int64_t capacity;   /* rows of an expert (expert_major), or in all (packed, flat). 0: what always fits, as long as no
                         token names an expert twice (expert_major of HT needs a number). rank_major: 0 */
  int32_t max_tokens; /* that a rank dispatches at once with it, the same on all ranks. 0: the group's */
  int32_t reserved;
} ncclEpxHandleOptions_t;
#define NCCL_EPX_HANDLE_OPTIONS_INIT NCCL_EP_STRUCT_INIT(ncclEpxHandleOptions_t, NCCL_EP_MAGIC)

/* num_topk: 0 or less is the group's, in LL too. */
NCCL_EPX_API ncclResult_t ncclEpxHandleMemSize(ncclEpGroup_t ep_group, ncclEpLayout_t layout,
                                               const ncclEpHandleConfig_t* config, size_t* size_out, int num_topk,
                                               const ncclEpxHandleOptions_t* options);
NCCL_EPX_API ncclResult_t ncclEpxInitHandle(ncclEpHandle_t* handle, ncclEpGroup_t ep_group, ncclEpLayout_t layout,
                                            const ncclEpHandleConfig_t* config, int num_topk,
                                            const ncclEpTensor_t* handle_mem, const ncclEpxHandleOptions_t* options);

/* Where things begin in an info tensor, int32. num_bins: L in the expert layouts, R in the others. */
#define NCCL_EPX_INFO_COUNTS(num_bins) 0                     /* [bins] rows in the tensor */
#define NCCL_EPX_INFO_DEMAND(num_bins) (num_bins)            /* [bins] rows that there would be without a capacity */
#define NCCL_EPX_INFO_OVERFLOW(num_bins) (2 * (num_bins))    /* [1] rows that were dropped */
#define NCCL_EPX_INFO_TOTAL(num_bins) (2 * (num_bins) + 1)   /* [1] sum of the counts */
#define NCCL_EPX_INFO_OFFSETS(num_bins) (2 * (num_bins) + 2) /* packed: [L + 1] starts of the experts, and the end */
#define NCCL_EPX_INFO_SIZE(num_bins) (2 * (num_bins) + 2)
#define NCCL_EPX_INFO_SIZE_PACKED(num_bins) (3 * (num_bins) + 3)

/* HT, of a handle with options, collective: the ranks learn what each sends to each. Fills `info` (NCCL_EPX_INFO_SIZE
 * or NCCL_EPX_INFO_SIZE_PACKED), and the dispatches that follow send along these routes, any number of them, until the
 * next ncclEpUpdateHandle. A handle of NCCL_EPX_CAPACITY_EXACT needs it: then it waits for the counts, and
 * ncclEpxDispatchShapes has the sizes. The rows of the dispatch before cannot be combined afterwards. */
NCCL_EPX_API ncclResult_t ncclEpxRouteHandle(ncclEpHandle_t handle, const ncclEpTensor_t* info, cudaStream_t stream);

typedef struct {
  unsigned int size, magic;
  ncclEpxLayout_t layout;
  int32_t topk, max_tokens, alignment;
  ncclEpxAlgorithm_t algorithm; /* that was taken */
  int32_t reserved;
  int64_t capacity; /* rows as in ncclEpxHandleOptions_t, rank_major: max_tokens; NCCL_EPX_CAPACITY_EXACT until they are
                       known */
} ncclEpxHandleInfo_t;
#define NCCL_EPX_HANDLE_INFO_INIT NCCL_EP_STRUCT_INIT(ncclEpxHandleInfo_t, NCCL_EP_MAGIC)
NCCL_EPX_API ncclResult_t ncclEpxHandleGetInfo(ncclEpHandle_t handle, ncclEpxHandleInfo_t* info);

/* ---- Dispatch ---- */

/* What dispatch does to bf16 or fp16 rows, beside NCCL_EP_DISP_QUANT_DS_FP8E3M4: e4m3 with a scale for 128 elements,
 * amax / 448 as fp32, the same rounded up to a power of two, or the exponents of that, four in an int32. NONE: what
 * quant_recipe says. */
typedef int32_t ncclEpxQuant_t;
enum { NCCL_EPX_QUANT_NONE = 0, NCCL_EPX_QUANT_FP8 = 1, NCCL_EPX_QUANT_FP8_ROUNDED = 2, NCCL_EPX_QUANT_FP8_UE8M0 = 3 };

#define NCCL_EPX_MAX_EXTRA 3

/* Outputs are [rows] or [rows, ...], "rows" being the leading sizes of the layout. */
typedef struct {
  unsigned int size, magic;
  ncclEpxQuant_t quant;
  int32_t zero_padding; /* rows that do not exist are zero; otherwise their content is unspecified */
  int32_t num_sms;      /* the same on all ranks; 0: as the group */
  int32_t cached; /* HT: other tensors along the routes of the handle's last dispatch, to the same rows. Tokens, scales
                     and extra tensors only: what else that dispatch gave stays as it was */
  int64_t scale_strides[2]; /* of inputs.scales, in elements. Both 0: contiguous */
  /* More tensors [T, n] on the same routes, of any type, rows a multiple of 16 bytes and aligned as tokens are, to
     [rows, n]. LL: the first travels in the rows of tokens where these have no scales, each other one in an operation
     of its own, which send_only has not. */
  ncclEpTensor_t* extra[NCCL_EPX_MAX_EXTRA];
  ncclEpTensor_t* extra_outputs[NCCL_EPX_MAX_EXTRA];
  ncclEpTensor_t* row_expert; /* packed: [rows] int32, -1 is padding */
  ncclEpTensor_t* info;       /* int32, all of NCCL_EPX_INFO_*; none after ncclEpxRouteHandle, which has filled it */
} ncclEpxDispatchExtra_t;
#define NCCL_EPX_DISPATCH_EXTRA_INIT NCCL_EP_STRUCT_INIT(ncclEpxDispatchExtra_t, NCCL_EP_MAGIC)

/* Of a handle with options: fills in ndim, datatype and sizes of the outputs that are not null, `sizes` of each being
 * room for NCCL_EPX_MAX_DIMS numbers; tells ndim 0 of those that there are not, which a dispatch may be given or not.
 * Of the inputs only types and sizes count. topk_idx is int64 until ncclEpUpdateHandle has seen int32 ids. In the
 * expert layouts topk_weights are [rows], with 0 where there is no row. */
NCCL_EPX_API ncclResult_t ncclEpxDispatchShapes(ncclEpHandle_t handle, const ncclEpDispatchInputs_t* inputs,
                                                const ncclEpDispatchOutputs_t* outputs,
                                                const ncclEpDispatchConfig_t* config,
                                                const ncclEpxDispatchExtra_t* extra);
NCCL_EPX_API ncclResult_t ncclEpxDispatch(ncclEpHandle_t handle, const ncclEpDispatchInputs_t* inputs,
                                          const ncclEpDispatchOutputs_t* outputs, const ncclEpLayoutInfo_t* layout_info,
                                          const ncclEpDispatchConfig_t* config, const ncclEpxDispatchExtra_t* extra,
                                          cudaStream_t stream);

/* ---- Combine ---- */

/* Who weights the experts' rows. AUTO: as NCCL EP has it, LL with outputs.topk_weights in the expert layouts, else the
 * caller. Rows of rank_major and flat are always the caller's sum over its experts: there DISPATCH and NONE mean the
 * same, and HOME is refused. */
typedef int32_t ncclEpxWeights_t;
enum {
  NCCL_EPX_WEIGHTS_AUTO = 0,
  NCCL_EPX_WEIGHTS_DISPATCH = 1, /* the library, with the weights of the dispatch */
  NCCL_EPX_WEIGHTS_NONE = 2,     /* nobody, or the caller has */
  NCCL_EPX_WEIGHTS_HOME = 3      /* the library, with topk_weights of the tokens' home rank */
};

/* Of partial sums on their way home: the output's type (AUTO), float32, or, for rows and outputs that are both bf16 or
 * both fp16, H a multiple of 16: e4m3 with a scale for 128 elements, or LogFMT. Outputs are of the rows' type, or
 * float32. */
typedef int32_t ncclEpxWire_t;
enum { NCCL_EPX_WIRE_AUTO = 0, NCCL_EPX_WIRE_FLOAT32 = 1, NCCL_EPX_WIRE_FLOAT8_E4M3 = 2, NCCL_EPX_WIRE_LOGFMT = 3 };

typedef struct {
  unsigned int size, magic;
  ncclEpxWeights_t weights;
  ncclEpxWire_t wire_dtype;
  int32_t num_sms;          /* the same on all ranks; 0: as the group */
  int32_t rows_per_signal;  /* row_signals: rows of a row block */
  int32_t signal_threshold; /* a row block is written when its signal is at least this, from 1 on */
  int32_t reserved;
  double scale; /* a token's sum is multiplied by it, in float32, before the biases are added. 0 stands for 1 */
  ncclEpTensor_t* topk_weights; /* HOME: [T, K] float32 */
  ncclEpTensor_t* topk_idx;     /* HOME, optional: [T, K]; where it is -1, that row is left out */
  ncclEpTensor_t* bias[2];      /* flat, optional: [T, H] of the output's type, added first */
  /* expert_major and packed, all types alike, LL only with send_only and HOME, optional: int32
     [L, ceil(capacity / rows_per_signal)], packed [ceil(capacity / rows_per_signal)], by which a kernel on another
     stream tells which blocks of the tokens' rows it has written. Other ranks need not. */
  ncclEpTensor_t* row_signals;
} ncclEpxCombineExtra_t;
#define NCCL_EPX_COMBINE_EXTRA_INIT NCCL_EP_STRUCT_INIT(ncclEpxCombineExtra_t, NCCL_EP_MAGIC)

NCCL_EPX_API ncclResult_t ncclEpxCombine(ncclEpHandle_t handle, const ncclEpCombineInputs_t* inputs,
                                         const ncclEpCombineOutputs_t* outputs, const ncclEpCombineConfig_t* config,
                                         const ncclEpxCombineExtra_t* extra, cudaStream_t stream);

/* Collective. Brings one float32 for each row home: values [rows], or [rows, K] in rank_major and flat; out [T, K], 0
 * where there is no row. The way of the weights' gradients, of LL too. */
NCCL_EPX_API ncclResult_t ncclEpxCombineWeights(ncclEpHandle_t handle, const ncclEpTensor_t* values,
                                                const ncclEpTensor_t* out, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif /* NCCL_EPX_H_ */
