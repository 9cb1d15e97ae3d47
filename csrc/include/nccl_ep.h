/* nccl_ep.h: expert-parallel dispatch and combine, in C, with the names, values and layouts of NVIDIA's NCCL EP 0.2.0.
 * A program that was compiled with NVIDIA's header runs with this library, and one that includes this header needs no
 * change. nccl_epx.h has what this library can do beyond it. docs/c_api.md says what each field means here, which have
 * no effect, and what is refused.
 *
 * A group is one rank's part of a communicator. A handle holds one routing: which token went to which expert. Dispatch
 * sends tokens to the ranks of their experts, combine brings the experts' rows home.
 *
 * Every struct begins with `size` and `magic`, which its NCCL_EP_*_INIT fills in. Structs only grow at their end: the
 * library reads what `size` covers, and nothing that it does not know. NCCL_EP_*_V1_SIZE and _V2_SIZE are the sizes
 * that versions of the API have had.
 *
 * Functions return an ncclResult_t and end no process. A call that is refused has changed nothing, and
 * ncclEpxGetLastError() (nccl_epx.h) has a sentence that says why.
 *
 * In the comments: R ranks, L experts on a rank, B max_dispatch_tokens_per_rank, T tokens of this rank, K choices of a
 * token, H elements of a row, N rows. LL is low latency, HT high throughput. */
#ifndef NCCL_EP_H_
#define NCCL_EP_H_

#include <stddef.h>
#include <stdint.h>

/* The types of CUDA and NCCL: theirs if there are headers, else the same for programs of CPU ranks. */
#if defined(__has_include)
#if __has_include(<cuda.h>) && __has_include(<cuda_runtime.h>) && __has_include(<nccl.h>)
#define NCCL_EPX_HAS_NCCL_H
#endif
#endif
#ifdef NCCL_EPX_HAS_NCCL_H
#include <cuda.h>
#include <nccl.h>
#else
typedef struct ncclComm* ncclComm_t;
typedef struct ncclWindow_vidmem* ncclWindow_t;
typedef struct CUstream_st* cudaStream_t;
typedef enum cudaError { cudaSuccess = 0, cudaErrorMemoryAllocation = 2, cudaErrorUnknown = 999 } cudaError_t;
typedef enum {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7
} ncclResult_t;
typedef enum {
  ncclInt8 = 0,
  ncclUint8 = 1,
  ncclInt32 = 2,
  ncclUint32 = 3,
  ncclInt64 = 4,
  ncclUint64 = 5,
  ncclFloat16 = 6,
  ncclFloat32 = 7,
  ncclFloat64 = 8,
  ncclBfloat16 = 9,
  ncclFloat8e4m3 = 10,
  ncclFloat8e5m2 = 11,
  ncclNumTypes = 12
} ncclDataType_t;
#endif

#ifndef ncclFloat4x2
#define ncclFloat4x2 ((ncclDataType_t)12) /* two numbers of 4 bits in a byte, which travel bit for bit */
#endif

#define NCCL_EP_MAJOR 0
#define NCCL_EP_MINOR 2
#define NCCL_EP_PATCH 0
#define NCCL_EP_VERSION_CODE (NCCL_EP_MAJOR * 10000 + NCCL_EP_MINOR * 100 + NCCL_EP_PATCH)

/* ---- Structs: their head, their sizes ---- */

#define NCCL_EP_API_VERSION 2
#define NCCL_EP_MAGIC 0xC00FFFEEu
#define NCCL_EP_TENSOR_MAGIC 0xCAFECAFE

#define NCCL_EP_FIELD_END(type_, field_) ((unsigned int)(offsetof(type_, field_) + sizeof(((type_*)0)->field_)))
#define NCCL_EP_HAS_FIELD(ptr_, type_, field_) ((ptr_) != NULL && (ptr_)->size >= NCCL_EP_FIELD_END(type_, field_))

#if defined(__cplusplus)
#define NCCL_EP_STATIC_ASSERT(cond_, msg_) static_assert((cond_), msg_)
#elif defined(__STDC_VERSION__) && __STDC_VERSION__ >= 201112L
#define NCCL_EP_STATIC_ASSERT(cond_, msg_) _Static_assert((cond_), msg_)
#else
#define NCCL_EP_STATIC_ASSERT(cond_, msg_)
#endif

/* An expression of the struct's type: for a declaration, an assignment or an argument. */
#if defined(__cplusplus)
template <class Struct>
inline Struct ncclEpxFilled(unsigned int magic) {
  Struct made = Struct();
  made.size = (unsigned int)sizeof(Struct);
  made.magic = magic;
  return made;
}
#define NCCL_EP_STRUCT_INIT(type_, magic_) (ncclEpxFilled<type_>(magic_))
#else
#define NCCL_EP_STRUCT_INIT(type_, magic_) ((type_){.size = (unsigned int)sizeof(type_), .magic = (magic_)})
#endif

/* Of a struct's current version, its last field and its size. */
#define NCCL_EPX_CHECK_STRUCT(type_, last_field_, size_)                                              \
  NCCL_EP_STATIC_ASSERT(offsetof(type_, magic) == 4 && sizeof(type_) == (size_) &&                    \
                            (sizeof(void*) != 8 || NCCL_EP_FIELD_END(type_, last_field_) == (size_)), \
                        #type_ " is not as NCCL EP 0.2.0 has it")

#if defined(__GNUC__)
#define NCCL_EPX_API __attribute__((visibility("default")))
#else
#define NCCL_EPX_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

NCCL_EPX_API ncclResult_t ncclEpGetVersion(int* version); /* NCCL_EP_VERSION_CODE of the library */

/* ---- Numbers with names ---- */

#define NCCL_EP_AUTO 0

typedef enum { NCCL_EP_ALGO_LOW_LATENCY = 0, NCCL_EP_ALGO_HIGH_THROUGHPUT = 1 } ncclEpAlgorithm_t;

/* HT: more rows come than max_recv_tokens_per_rank. AUTO is TRAP. */
typedef enum {
  NCCL_EP_OVERFLOW_AUTO = NCCL_EP_AUTO,
  NCCL_EP_OVERFLOW_TRAP, /* an error: of ncclEpUpdateHandle on the CPU, of ncclEpxCheck on CUDA */
  NCCL_EP_OVERFLOW_DROP  /* the rows that do not fit are left out */
} ncclEpOverflowPolicy_t;

/* What a dispatch gives, and a combine takes. */
typedef enum {
  NCCL_EP_LAYOUT_UNSET = 0,
  NCCL_EP_LAYOUT_EXPERT_MAJOR, /* LL: [L, R * B, H]. HT: [N, H], expert after expert */
  NCCL_EP_LAYOUT_RANK_MAJOR,   /* LL: [R, B, H], one row for all the experts here of a token */
  NCCL_EP_LAYOUT_FLAT          /* HT: [N, H], the same, by source rank and token */
} ncclEpLayout_t;

typedef enum { NCCL_EP_FWD_PASS = 0, NCCL_EP_BWD_PASS = 1 } ncclEpPassDir_t;

typedef enum {
  NCCL_EP_ZERO_COPY_AUTO = NCCL_EP_AUTO,
  NCCL_EP_ZERO_COPY_OFF,
  NCCL_EP_ZERO_COPY_ON
} ncclEpZeroCopyMode_t;

/* Expert ids that a dispatch gives: LOCAL ones count from 0 on each rank. AUTO is LOCAL. */
typedef enum {
  NCCL_EP_EXPERT_ID_AUTO = NCCL_EP_AUTO,
  NCCL_EP_EXPERT_ID_LOCAL = 1,
  NCCL_EP_EXPERT_ID_GLOBAL = 2
} ncclEpExpertIdKind_t;

typedef enum {
  NCCL_EP_DISP_QUANT_NONE = 0,      /* rows travel as they are */
  NCCL_EP_DISP_QUANT_FWD = 1,       /* the caller's rows and scales travel, byte for byte */
  NCCL_EP_DISP_QUANT_DS_FP8E3M4 = 2 /* LL: bf16 becomes e4m3 with a float32 scale for 128 elements */
} ncclEpDispQuant_t;

typedef enum { NCCL_EP_COMB_QUANT_NONE = 0, NCCL_EP_COMB_QUANT_NVFP4 = 1 } ncclEpCombQuant_t;

/* ---- Tensors ---- */

/* A contiguous tensor in memory of the group's device, which is the caller's. `data`, or a window of NCCL and an offset
 * of bytes in it. `sizes` has ndim numbers and is the caller's. */
typedef struct ncclEpTensor {
  unsigned int size;
  unsigned int magic; /* NCCL_EP_TENSOR_MAGIC, or one of the library's own in tensors of ncclEpTensorAlloc */
  unsigned int ndim;
  ncclDataType_t datatype;
  void* data;
  ncclWindow_t win_hdl;
  uint64_t win_offset;
  size_t* sizes;
} ncclEpTensor_t;
#define NCCL_EP_TENSOR_INIT_INLINE .size = (unsigned int)sizeof(ncclEpTensor_t), .magic = NCCL_EP_TENSOR_MAGIC
#define NCCL_EP_TENSOR_SIZE ((unsigned int)sizeof(ncclEpTensor_t))
#define NCCL_EP_TENSOR_V1_LAST_FIELD sizes
#define NCCL_EP_TENSOR_V1_SIZE 48u
#define NCCL_EP_TENSOR_CURRENT_VERSION 1

typedef struct {
  unsigned int size, magic;
} ncclEpTensorAllocConfig_t;
#define NCCL_EP_TENSOR_ALLOC_CONFIG_SIZE ((unsigned int)sizeof(ncclEpTensorAllocConfig_t))
#define NCCL_EP_TENSOR_ALLOC_CONFIG_V1_LAST_FIELD magic
#define NCCL_EP_TENSOR_ALLOC_CONFIG_V1_SIZE 8u
#define NCCL_EP_TENSOR_ALLOC_CONFIG_CURRENT_VERSION 1

/* A descriptor with a copy of `sizes`, without data. */
NCCL_EPX_API ncclResult_t ncclEpTensorAlloc(ncclEpTensor_t** tensor, unsigned int ndim, ncclDataType_t datatype,
                                            const size_t* sizes, const ncclEpTensorAllocConfig_t* config);
/* Null is allowed. */
NCCL_EPX_API ncclResult_t ncclEpTensorDestroy(ncclEpTensor_t* tensor);

/* ---- Groups ---- */

typedef cudaError_t (*ncclEpAllocFn_t)(void** ptr, size_t size, void* context);
typedef cudaError_t (*ncclEpFreeFn_t)(void* ptr, void* context);
/* Where memory of handles comes from. Both functions or none. */
typedef struct {
  ncclEpAllocFn_t alloc_fn;
  ncclEpFreeFn_t free_fn;
  void* context;
} ncclEpAllocConfig_t;

typedef struct {
  unsigned int size, magic;
  unsigned int version;
  ncclEpAlgorithm_t algorithm;
  unsigned int num_experts;
  unsigned int max_dispatch_tokens_per_rank; /* that a rank sends at once */
  unsigned int max_recv_tokens_per_rank;     /* HT: rows of an output. AUTO: as many as come, which recv_total_counter
                                                tells */
  unsigned int max_token_bytes;              /* of a row, with its scales */
  unsigned long int rdma_buffer_size;        /* without effect, as are the two that follow */
  unsigned int num_qp_per_rank;
  unsigned int num_channels;
  unsigned int max_num_sms; /* of an operation. AUTO: the library's choice */
  ncclEpAllocConfig_t alloc;
  unsigned int enable_mask;       /* LL: a rank that is late is masked, and the group does not fail */
  uint64_t timeout_ns;            /* of every wait for another rank. 0: 100 s. NCCL_EP_TIMEOUT_MS of the
                                     environment goes before it */
  ncclEpZeroCopyMode_t zero_copy; /* here the V1 struct ends. ON: who gives no window is refused */
  ncclEpOverflowPolicy_t overflow_policy;
  unsigned int num_topk; /* the most choices of a token. 0: 8, and more when a handle has more */
  unsigned char padding_v2[4];
} ncclEpGroupConfig_t;
#define NCCL_EP_GROUP_CONFIG_SIZE ((unsigned int)sizeof(ncclEpGroupConfig_t))
#define NCCL_EP_GROUP_CONFIG_V1_LAST_FIELD timeout_ns
#define NCCL_EP_GROUP_CONFIG_V1_SIZE 96u
#define NCCL_EP_GROUP_CONFIG_V2_LAST_FIELD padding_v2
#define NCCL_EP_GROUP_CONFIG_V2_SIZE 112u
#define NCCL_EP_GROUP_CONFIG_CURRENT_VERSION 2

typedef struct ncclEpGroup* ncclEpGroup_t;

/* Collective. The communicator is NCCL's, or for CPU ranks one of ncclEpxCommFromCallback. It must outlive the group.
 */
NCCL_EPX_API ncclResult_t ncclEpCreateGroup(ncclEpGroup_t* ep_group, ncclComm_t comm,
                                            const ncclEpGroupConfig_t* config);
/* Waits for no other rank longer than the deadline. Handles that are left can only be destroyed. Null is allowed. */
NCCL_EPX_API ncclResult_t ncclEpGroupDestroy(ncclEpGroup_t ep_group);

/* ---- Handles ---- */

typedef struct ncclEpHandle* ncclEpHandle_t;

typedef struct {
  unsigned int size, magic;
  size_t dispatch_output_per_expert_alignment; /* HT expert-major: an expert's rows begin at a multiple of it, a power
                                                  of two, and the rows between are zero. 0: 1 */
} ncclEpHandleConfig_t;
#define NCCL_EP_HANDLE_CONFIG_SIZE ((unsigned int)sizeof(ncclEpHandleConfig_t))
#define NCCL_EP_HANDLE_CONFIG_V1_LAST_FIELD dispatch_output_per_expert_alignment
#define NCCL_EP_HANDLE_CONFIG_V1_SIZE 16u
#define NCCL_EP_HANDLE_CONFIG_CURRENT_VERSION 1

/* Counts of what comes, each optional if not said otherwise: int32, or (HT, but the counters of FLAT) int64. */
typedef struct {
  unsigned int size, magic;
  ncclEpTensor_t* expert_counters;    /* [L]. LL expert-major, required: rows. HT: rows that there would be without a
                                         limit, in expert-major those between experts with them */
  ncclEpTensor_t* src_rank_counters;  /* [R]. LL rank-major: rows from each rank */
  ncclEpTensor_t* expert_offsets;     /* [L]. HT expert-major: where an expert's rows begin */
  ncclEpTensor_t* recv_total_counter; /* [1]. HT: the rows of all, without a limit */
  ncclEpExpertIdKind_t recv_topk_idx_kind; /* of ncclEpDispatch. Here the V1 struct has ended */
  unsigned char padding_v2[4];
} ncclEpLayoutInfo_t;
#define NCCL_EP_LAYOUT_INFO_SIZE ((unsigned int)sizeof(ncclEpLayoutInfo_t))
#define NCCL_EP_LAYOUT_INFO_V1_LAST_FIELD recv_total_counter
#define NCCL_EP_LAYOUT_INFO_V1_SIZE 40u
#define NCCL_EP_LAYOUT_INFO_V2_LAST_FIELD padding_v2
#define NCCL_EP_LAYOUT_INFO_V2_SIZE 48u
#define NCCL_EP_LAYOUT_INFO_CURRENT_VERSION 2

/* Bytes of device memory that a handle needs. num_topk: HT takes the group's, or the most there can be, for 0 or less.
 */
NCCL_EPX_API ncclResult_t ncclEpHandleMemSize(ncclEpGroup_t ep_group, ncclEpLayout_t layout,
                                              const ncclEpHandleConfig_t* config, size_t* size_out, int num_topk);
/* handle_mem: 1-D uint8 of that size, the caller's until the handle is destroyed; null: the library allocates it.
 * Collective where num_topk is more than any handle of a group without a num_topk has had. HT: a num_topk of 0 or less
 * is the group's. */
NCCL_EPX_API ncclResult_t ncclEpInitHandle(ncclEpHandle_t* handle, ncclEpGroup_t ep_group, ncclEpLayout_t layout,
                                           const ncclEpHandleConfig_t* config, int num_topk,
                                           const ncclEpTensor_t* handle_mem);
/* topk_idx: [T, K] int64 or int32, -1 for no choice. LL keeps the address until the dispatch, and layout_info is null.
 * HT: collective; the ranks learn what each sends to each, and the counters of layout_info are filled. */
NCCL_EPX_API ncclResult_t ncclEpUpdateHandle(ncclEpHandle_t handle, const ncclEpTensor_t* topk_idx,
                                             const ncclEpLayoutInfo_t* layout_info, cudaStream_t stream);
/* ncclEpInitHandle with the K of topk_idx, then ncclEpUpdateHandle. */
NCCL_EPX_API ncclResult_t ncclEpCreateHandle(ncclEpHandle_t* handle, ncclEpGroup_t ep_group, ncclEpLayout_t layout,
                                             const ncclEpTensor_t* topk_idx, const ncclEpLayoutInfo_t* layout_info,
                                             const ncclEpHandleConfig_t* config, cudaStream_t stream);
/* Refused while a send of it has not been received. Null is allowed. */
NCCL_EPX_API ncclResult_t ncclEpHandleDestroy(ncclEpHandle_t handle);

/* ---- Dispatch ---- */

typedef struct {
  unsigned int size, magic;
  ncclEpTensor_t* tokens;       /* [T, H], rows a multiple of 16 bytes */
  ncclEpTensor_t* topk_weights; /* [T, K] float32. Required in LL rank-major and in a forward pass of HT, else null */
  ncclEpTensor_t* scales;       /* [T, S], with QUANT_FWD */
} ncclEpDispatchInputs_t;
#define NCCL_EP_DISPATCH_INPUTS_SIZE ((unsigned int)sizeof(ncclEpDispatchInputs_t))
#define NCCL_EP_DISPATCH_INPUTS_V1_LAST_FIELD scales
#define NCCL_EP_DISPATCH_INPUTS_V1_SIZE 32u
#define NCCL_EP_DISPATCH_INPUTS_CURRENT_VERSION 1

/* Leading sizes as the layout has them. N of HT is at least max_recv_tokens_per_rank, or, with AUTO, the rows that
 * come.
 */
typedef struct {
  unsigned int size, magic;
  ncclEpTensor_t* tokens;
  ncclEpTensor_t* topk_weights; /* float32. LL rank-major [R, B, K]; HT forward: FLAT [N, K], expert-major [N] */
  ncclEpTensor_t* scales;       /* where rows have scales */
  ncclEpTensor_t* topk_idx; /* [R, B, K] or [N, K], -1 where a choice is not here, int32 or int64. With topk_weights,
                               but in HT expert-major */
} ncclEpDispatchOutputs_t;
#define NCCL_EP_DISPATCH_OUTPUTS_SIZE ((unsigned int)sizeof(ncclEpDispatchOutputs_t))
#define NCCL_EP_DISPATCH_OUTPUTS_V1_LAST_FIELD topk_idx
#define NCCL_EP_DISPATCH_OUTPUTS_V1_SIZE 40u
#define NCCL_EP_DISPATCH_OUTPUTS_CURRENT_VERSION 1

typedef struct {
  unsigned int size, magic;
  unsigned int send_only;         /* LL: the send alone; ncclEpComplete receives. HT has none */
  unsigned int round_scales;      /* scales that are made are powers of two */
  ncclEpPassDir_t pass_direction; /* HT: BWD moves tokens alone, along the routes of the handle */
  ncclEpDispQuant_t quant_recipe; /* V1 ends before it */
} ncclEpDispatchConfig_t;
#define NCCL_EP_DISPATCH_CONFIG_SIZE ((unsigned int)sizeof(ncclEpDispatchConfig_t))
#define NCCL_EP_DISPATCH_CONFIG_V1_LAST_FIELD pass_direction
#define NCCL_EP_DISPATCH_CONFIG_V1_SIZE 20u
#define NCCL_EP_DISPATCH_CONFIG_V2_LAST_FIELD quant_recipe
#define NCCL_EP_DISPATCH_CONFIG_V2_SIZE 24u
#define NCCL_EP_DISPATCH_CONFIG_CURRENT_VERSION 2

/* Collective. layout_info is for LL, but for recv_topk_idx_kind. Null configs are as INIT leaves them. */
NCCL_EPX_API ncclResult_t ncclEpDispatch(ncclEpHandle_t handle, const ncclEpDispatchInputs_t* inputs,
                                         const ncclEpDispatchOutputs_t* outputs, const ncclEpLayoutInfo_t* layout_info,
                                         const ncclEpDispatchConfig_t* config, cudaStream_t stream);

/* ---- Combine ---- */

typedef struct {
  unsigned int size, magic;
  ncclEpTensor_t* tokens;       /* of the dispatch's shape, bf16, fp16 or fp32. RANK_MAJOR, FLAT and HT expert-major:
                                   the caller has weighted them */
  ncclEpTensor_t* topk_weights; /* BWD: a number for each row (expert-major) or each of its choices */
  ncclEpTensor_t* scales;       /* NVFP4, which is refused. V1 ends before it */
} ncclEpCombineInputs_t;
#define NCCL_EP_COMBINE_INPUTS_SIZE ((unsigned int)sizeof(ncclEpCombineInputs_t))
#define NCCL_EP_COMBINE_INPUTS_V1_LAST_FIELD topk_weights
#define NCCL_EP_COMBINE_INPUTS_V1_SIZE 24u
#define NCCL_EP_COMBINE_INPUTS_V2_LAST_FIELD scales
#define NCCL_EP_COMBINE_INPUTS_V2_SIZE 32u
#define NCCL_EP_COMBINE_INPUTS_CURRENT_VERSION 2

typedef struct {
  unsigned int size, magic;
  ncclEpTensor_t* tokens;       /* [T, H] */
  ncclEpTensor_t* topk_weights; /* [T, K] float32. LL expert-major: read, the weights of the sum. BWD: written, what
                                   inputs.topk_weights has for each choice */
} ncclEpCombineOutputs_t;
#define NCCL_EP_COMBINE_OUTPUTS_SIZE ((unsigned int)sizeof(ncclEpCombineOutputs_t))
#define NCCL_EP_COMBINE_OUTPUTS_V1_LAST_FIELD topk_weights
#define NCCL_EP_COMBINE_OUTPUTS_V1_SIZE 24u
#define NCCL_EP_COMBINE_OUTPUTS_CURRENT_VERSION 1

typedef struct {
  unsigned int size, magic;
  unsigned int send_only;
  ncclEpPassDir_t pass_direction;
  ncclEpCombQuant_t quant_recipe; /* V1 ends before it */
} ncclEpCombineConfig_t;
#define NCCL_EP_COMBINE_CONFIG_SIZE ((unsigned int)sizeof(ncclEpCombineConfig_t))
#define NCCL_EP_COMBINE_CONFIG_V1_LAST_FIELD pass_direction
#define NCCL_EP_COMBINE_CONFIG_V1_SIZE 16u
#define NCCL_EP_COMBINE_CONFIG_V2_LAST_FIELD quant_recipe
#define NCCL_EP_COMBINE_CONFIG_V2_SIZE 20u
#define NCCL_EP_COMBINE_CONFIG_CURRENT_VERSION 2

/* Collective, any number of times after a dispatch. */
NCCL_EPX_API ncclResult_t ncclEpCombine(ncclEpHandle_t handle, const ncclEpCombineInputs_t* inputs,
                                        const ncclEpCombineOutputs_t* outputs, const ncclEpCombineConfig_t* config,
                                        cudaStream_t stream);

/* ---- The receive of what was sent with send_only ---- */

typedef struct ncclEpCompleteConfig {
  unsigned int size, magic;
} ncclEpCompleteConfig_t;
#define NCCL_EP_COMPLETE_CONFIG_SIZE ((unsigned int)sizeof(ncclEpCompleteConfig_t))
#define NCCL_EP_COMPLETE_CONFIG_V1_LAST_FIELD magic
#define NCCL_EP_COMPLETE_CONFIG_V1_SIZE 8u
#define NCCL_EP_COMPLETE_CONFIG_CURRENT_VERSION 1

/* Nothing to do where nothing was sent. */
NCCL_EPX_API ncclResult_t ncclEpComplete(ncclEpHandle_t handle, const ncclEpCompleteConfig_t* config,
                                         cudaStream_t stream);

/* ---- Masks: of groups with enable_mask, others give ncclInvalidUsage. 1 is an active rank, 0 a masked one. ---- */

/* mask_status: int [R] on the group's device. */
NCCL_EPX_API ncclResult_t ncclEpMaskQuery(ncclEpGroup_t ep_group, int* mask_status, cudaStream_t stream);
/* mask: int [R] on the host. A masked rank that is 1 counts as active until the next operation, which masks it again:
 * it comes back by ncclEpMaskClean. */
NCCL_EPX_API ncclResult_t ncclEpMaskUpdate(ncclEpGroup_t ep_group, const int* mask, cudaStream_t stream);
/* Unmasks all. Collective among those that come; masked ranks are waited for one deadline. Between NVLink domains, of
 * all ranks. */
NCCL_EPX_API ncclResult_t ncclEpMaskClean(ncclEpGroup_t ep_group, cudaStream_t stream);
/* 1: a rank was masked because it was late, since the last ncclEpErrorClear. */
NCCL_EPX_API ncclResult_t ncclEpGetAsyncError(ncclEpGroup_t ep_group, int* error_out);
NCCL_EPX_API ncclResult_t ncclEpErrorClear(ncclEpGroup_t ep_group);

#ifdef __cplusplus
}

template <>
inline ncclEpGroupConfig_t ncclEpxFilled<ncclEpGroupConfig_t>(unsigned int magic) {
  ncclEpGroupConfig_t made = ncclEpGroupConfig_t();
  made.size = (unsigned int)sizeof(ncclEpGroupConfig_t);
  made.magic = magic;
  made.version = NCCL_EP_API_VERSION;
  return made;
}
#define NCCL_EP_GROUP_CONFIG_INIT NCCL_EP_STRUCT_INIT(ncclEpGroupConfig_t, NCCL_EP_MAGIC)
#else
#define NCCL_EP_GROUP_CONFIG_INIT \
  ((ncclEpGroupConfig_t){         \
      .size = (unsigned int)sizeof(ncclEpGroupConfig_t), .magic = NCCL_EP_MAGIC, .version = NCCL_EP_API_VERSION})
#endif

#define NCCL_EP_TENSOR_INIT NCCL_EP_STRUCT_INIT(ncclEpTensor_t, NCCL_EP_TENSOR_MAGIC)
#define NCCL_EP_TENSOR_ALLOC_CONFIG_INIT NCCL_EP_STRUCT_INIT(ncclEpTensorAllocConfig_t, NCCL_EP_MAGIC)
#define NCCL_EP_HANDLE_CONFIG_INIT NCCL_EP_STRUCT_INIT(ncclEpHandleConfig_t, NCCL_EP_MAGIC)
#define NCCL_EP_LAYOUT_INFO_INIT NCCL_EP_STRUCT_INIT(ncclEpLayoutInfo_t, NCCL_EP_MAGIC)
#define NCCL_EP_DISPATCH_INPUTS_INIT NCCL_EP_STRUCT_INIT(ncclEpDispatchInputs_t, NCCL_EP_MAGIC)
#define NCCL_EP_DISPATCH_OUTPUTS_INIT NCCL_EP_STRUCT_INIT(ncclEpDispatchOutputs_t, NCCL_EP_MAGIC)
#define NCCL_EP_DISPATCH_CONFIG_INIT NCCL_EP_STRUCT_INIT(ncclEpDispatchConfig_t, NCCL_EP_MAGIC)
#define NCCL_EP_COMBINE_INPUTS_INIT NCCL_EP_STRUCT_INIT(ncclEpCombineInputs_t, NCCL_EP_MAGIC)
#define NCCL_EP_COMBINE_OUTPUTS_INIT NCCL_EP_STRUCT_INIT(ncclEpCombineOutputs_t, NCCL_EP_MAGIC)
#define NCCL_EP_COMBINE_CONFIG_INIT NCCL_EP_STRUCT_INIT(ncclEpCombineConfig_t, NCCL_EP_MAGIC)
#define NCCL_EP_COMPLETE_CONFIG_INIT NCCL_EP_STRUCT_INIT(ncclEpCompleteConfig_t, NCCL_EP_MAGIC)

NCCL_EPX_CHECK_STRUCT(ncclEpTensor_t, sizes, NCCL_EP_TENSOR_V1_SIZE);
NCCL_EPX_CHECK_STRUCT(ncclEpTensorAllocConfig_t, magic, NCCL_EP_TENSOR_ALLOC_CONFIG_V1_SIZE);
NCCL_EPX_CHECK_STRUCT(ncclEpGroupConfig_t, padding_v2, NCCL_EP_GROUP_CONFIG_V2_SIZE);
NCCL_EPX_CHECK_STRUCT(ncclEpHandleConfig_t, dispatch_output_per_expert_alignment, NCCL_EP_HANDLE_CONFIG_V1_SIZE);
NCCL_EPX_CHECK_STRUCT(ncclEpLayoutInfo_t, padding_v2, NCCL_EP_LAYOUT_INFO_V2_SIZE);
NCCL_EPX_CHECK_STRUCT(ncclEpDispatchInputs_t, scales, NCCL_EP_DISPATCH_INPUTS_V1_SIZE);
NCCL_EPX_CHECK_STRUCT(ncclEpDispatchOutputs_t, topk_idx, NCCL_EP_DISPATCH_OUTPUTS_V1_SIZE);
NCCL_EPX_CHECK_STRUCT(ncclEpDispatchConfig_t, quant_recipe, NCCL_EP_DISPATCH_CONFIG_V2_SIZE);
NCCL_EPX_CHECK_STRUCT(ncclEpCombineInputs_t, scales, NCCL_EP_COMBINE_INPUTS_V2_SIZE);
NCCL_EPX_CHECK_STRUCT(ncclEpCombineOutputs_t, topk_weights, NCCL_EP_COMBINE_OUTPUTS_V1_SIZE);
NCCL_EPX_CHECK_STRUCT(ncclEpCombineConfig_t, quant_recipe, NCCL_EP_COMBINE_CONFIG_V2_SIZE);
NCCL_EPX_CHECK_STRUCT(ncclEpCompleteConfig_t, magic, NCCL_EP_COMPLETE_CONFIG_V1_SIZE);

#endif /* NCCL_EP_H_ */
