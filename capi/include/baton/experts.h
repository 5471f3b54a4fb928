// Expert parallelism of mixture models from C: rows of tokens go to the ranks of their experts, and
// what those say comes back, weighted and summed. As collectives/experts.h, which has the rules.
//
//   baton_experts_options options = BATON_EXPERTS_OPTIONS_INIT;
//   options.experts = 64, options.top_k = 8, options.hidden = 4096, options.max_tokens = 512;
//   baton_experts* experts;
//   baton_experts_create(comm, &options, &experts, &error);            // every rank calls it
//   baton_work work, back;
//   baton_experts_dispatch(experts, rows, tokens, chosen, tokens * 8, &work, &error);
//   baton_experts_wait(experts, work, BATON_FOREVER, &error);
//   baton_expert_rows in = BATON_EXPERT_ROWS_INIT;
//   baton_experts_received(experts, work, &in, &error);
//   ... for each slot: read row in.row_of[slot], write output slot ...
//   baton_experts_combine(experts, work, weights, tokens * 8, out, out_bytes, &back, &error);
//   baton_experts_wait(experts, back, BATON_FOREVER, &error);
//
// A work is one of this baton_experts. One thread at a time. Destroy it before the endpoint.
#ifndef BATON_EXPERTS_H
#define BATON_EXPERTS_H

#include "collectives.h"  // beside this file, whichever folder the include path names

#ifdef __cplusplus
extern "C" {
#endif

typedef struct baton_experts baton_experts;

typedef enum baton_experts_mode {
  BATON_EXPERTS_AUTO = 0,
  BATON_EXPERTS_LOW_LATENCY = 1,
  BATON_EXPERTS_THROUGHPUT = 2
} baton_experts_mode;

typedef struct baton_experts_options {
  size_t size;           // sizeof(baton_experts_options)
  int32_t experts;       // of all ranks together, a multiple of their number
  int32_t top_k;         // of a token
  int32_t hidden;        // elements of a row
  int32_t max_tokens;    // of one rank in one round
  int32_t type;          // a baton_type: BATON_F32, BATON_BF16 or BATON_F16
  int32_t fp8;           // not 0: dispatched rows travel as e4m3 with scales
  int32_t capacity;      // tokens of one rank for one expert; 0: as many as there are
  int32_t in_flight;     // rounds that may be open at a time; 0: 1
  int32_t mode;          // a baton_experts_mode
  int32_t unused;        // 0
  int64_t rank_timeout;  // nanoseconds after which a silent rank is masked; 0: 60 s
} baton_experts_options;
#define BATON_EXPERTS_OPTIONS_INIT \
  { sizeof(baton_experts_options), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }

// The slots of one expert: [first, first + count).
typedef struct baton_expert_group {
  int32_t expert;
  int32_t first;
  int32_t count;
} baton_expert_group;

// The rows that a dispatch brought, valid until its combine begins (`outputs`: has ended).
typedef struct baton_expert_rows {
  size_t size;                       // sizeof(baton_expert_rows)
  const baton_expert_group* groups;  // of each expert of this rank, in ascending number
  uint64_t group_count;
  const uint32_t* row_of;  // [slots]: the number of its row
  uint64_t slots;
  const void* rows;  // row n is n * row_stride bytes behind it
  uint64_t row_stride;
  uint64_t scales_offset;  // with fp8: from a row to its f32 scales, one per 128 elements; else 0
  void* outputs;           // slot n is n * output_stride bytes behind it
  uint64_t output_stride;
} baton_expert_rows;
#define BATON_EXPERT_ROWS_INIT \
  { sizeof(baton_expert_rows), 0, 0, 0, 0, 0, 0, 0, 0, 0 }

// Every rank of the communicator calls it. BATON_ERR_INVALID_PARAM at all ranks: options that no
// rank can have, or that differ.
int32_t baton_experts_create(baton_comm* comm, const baton_experts_options* options,
                             baton_experts** out, baton_error* error);
// Not collective. NULL: nothing.
void baton_experts_destroy(baton_experts* experts);

// Begins a round. rows: [tokens][hidden]; chosen: [tokens][top_k], `choices` in all, -1 for none.
// Both untouched until the work has ended. BATON_ERR_INVALID_PARAM, BATON_ERR_NOT_ALLOWED (too
// many rounds are open), BATON_ERR_BACKEND (the capacity): nothing was begun.
int32_t baton_experts_dispatch(baton_experts* experts, const void* rows, int32_t tokens,
                               const int32_t* chosen, uint64_t choices, baton_work* work,
                               baton_error* error);
// After a dispatch has ended well.
int32_t baton_experts_received(const baton_experts* experts, baton_work dispatch,
                               baton_expert_rows* out, baton_error* error);
// Ends the round. weights: [tokens][top_k], `count` in all; out: [tokens][hidden], `out_bytes`.
int32_t baton_experts_combine(baton_experts* experts, baton_work dispatch, const float* weights,
                              uint64_t count, void* out, uint64_t out_bytes, baton_work* work,
                              baton_error* error);
// How the work ended, told once; BATON_ERR_TIMEOUT: it goes on.
int32_t baton_experts_wait(baton_experts* experts, baton_work work, int64_t timeout,
                           baton_error* error);
// The same without waiting: BATON_IN_PROGRESS while it runs.
int32_t baton_experts_test(baton_experts* experts, baton_work work, baton_error* error);
// The ranks that a work which has ended went without; work 0: all that are masked. At most `room`
// of them to `ranks`, which may be NULL; `*count` is how many there are.
int32_t baton_experts_missing(const baton_experts* experts, baton_work work, int32_t* ranks,
                              size_t room, size_t* count, baton_error* error);
// `elements` e4m3 values of a received row times their blocks' scales.
void baton_experts_dequantise(const void* row, const float* scales, uint64_t elements, float* out);

#ifdef __cplusplus
}
#endif

#endif
