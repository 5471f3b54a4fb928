// Experts: rows of tokens go to the ranks that have their experts, and what those say comes back,
// weighted and summed. Expert parallelism of mixture models, as DeepEP's dispatch and combine.
//
//   auto experts = Experts::create(*comm, {.experts = 64, .top_k = 8, .hidden = 4096,
//                                          .max_tokens = 512});        // every rank calls it
//   auto round = (*experts)->dispatch(rows, tokens, chosen);           // chosen: [tokens][top_k]
//   for (const ExpertGroup& group : round->groups)                     // experts of this rank
//     for (int slot = group.first; slot < group.first + group.count; ++slot)
//       ask(group.expert, round->row(slot), round->output(slot));      // one row in, one row out
//   absl::Status status = (*experts)->combine(*round, weights, out, out_bytes);  //
//   [tokens][hidden]
//
// Experts are numbered over all ranks; rank r has the experts from r * experts / ranks on. A token
// names up to top_k different experts, -1 for none. Its row travels once to each rank that has one
// of them. `out` has for each token the sum of its experts' rows times their weights, in ascending
// number of the expert, in f32, each product added by a fused multiply-add (where the CPU has it),
// and rounded to `type` once at the end: the bits that one rank gives which has all experts, from
// whatever order rows came in. A token without experts gets zeros.
//
// A round is a dispatch and then its combine; all ranks make the same rounds in the same order.
// Counts need no round of their own: the rows of one rank for another are one write, whose counter
// rises by their number plus one. Rows of a rank have places of their own at every other one.
//
// Slots. A slot is a token at an expert. Slots of one expert lie behind one another, in the order
// of the tokens' ranks and then of the tokens. With exact counts (capacity 0) those of all experts
// do; with a capacity, expert e of this rank (from 0) begins at slot e * ranks * capacity, whatever
// came, and no rank may have more than `capacity` tokens for one expert.
//
// Async. dispatch_async() and combine_async() begin, wait() and test() advance and end: a Work is
// one of this object, not of the communicator. Bytes move meanwhile if the endpoint has a
// background thread; sums are made by the thread that finds the bytes there. What a call was given
// must stay untouched until its end.
//
// Failure. A rank that dies, leaves or sends nothing for `rank_timeout` is masked, for good: the
// call goes on without it, and missing() tells. Its tokens are not in the dispatch; its experts are
// not in the sums. All else is exact. Other errors are of the caller's making (InvalidArgument,
// FailedPrecondition: nothing was begun, and the call can be made again, for which the other ranks
// wait), or end the object. A mask is this rank's: one that was only slow is masked by those that
// did not wait, and hears from them no more.
//
// Memory is that of one window of each rank, sized for the worst case: see bytes(). Rows in memory
// of Communicator::allocate() are not registered anew in each dispatch.
//
// Threads: one at a time. Life: it makes a group of its own among the same processes, and outlives
// the communicator, its failures and its end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "collectives/communicator.h"

namespace baton {

enum class ExpertsMode : uint8_t {
  kAuto,        // by the bytes for each rank: up to 64 KiB as kLowLatency
  kLowLatency,  // rows are packed behind their list: one write to each rank
  kThroughput,  // rows go from where they are: one copy, and a write more
};

// Equal at all ranks, but for `mode` and `rank_timeout`.
struct ExpertsOptions {
  int experts = 0;     // of all ranks together, a multiple of their number; 32,767 a rank at most
  int top_k = 0;       // experts of a token, 1 to 64
  int hidden = 0;      // elements of a row
  int max_tokens = 0;  // of one rank in one round
  DataType type = DataType::kBF16;  // of rows: f32, bf16 or f16
  // Dispatched rows travel, and are received, as e4m3: blocks of 128 elements with one f32 scale
  // each, the largest magnitude in the block over 448 (DeepEP's format). A block with NaN or an
  // infinity is NaN throughout. What experts say travels as `type`.
  bool fp8 = false;
  int capacity = 0;   // tokens of one rank for one expert; 0: as many as there are
  int in_flight = 1;  // rounds that may be open at a time, 1 to 4; each has its own memory
  ExpertsMode mode = ExpertsMode::kAuto;
  Time rank_timeout = Time::zero();  // zero: 60 s
};

// The slots of one expert.
struct ExpertGroup {
  int expert = 0;
  int first = 0;
  int count = 0;
};

// The rows that a dispatch brought to this rank. A plain value that points into memory of the
// Experts, valid until the round's combine begins (`outputs`: has ended).
struct ExpertRows {
  absl::Span<const ExpertGroup> groups;  // of each expert of this rank, in ascending number
  absl::Span<const uint32_t> row_of;     // [slots]: its row; with a capacity also of unused slots
  const std::byte* rows = nullptr;
  size_t row_stride = 0;     // bytes
  size_t scales_offset = 0;  // with fp8: bytes from a row to its f32 scales, one per 128 elements
  std::byte* outputs = nullptr;  // [slots]: what experts say, to be written before combine
  size_t output_stride = 0;      // bytes
  Work work;                     // of the dispatch

  const std::byte* row(int slot) const {
    return rows + row_of[static_cast<size_t>(slot)] * row_stride;
  }
  std::byte* output(int slot) const { return outputs + static_cast<size_t>(slot) * output_stride; }
};

class Experts {
 public:
  // Collective, and blocks. InvalidArgument, at all ranks: options that no rank can have, or that
  // differ; says whose. ResourceExhausted: a rank has too little memory.
  static absl::StatusOr<std::unique_ptr<Experts>> create(Communicator& comm,
                                                         const ExpertsOptions& options);
  // Not collective. Waits until no other rank reads what this one's experts said in its last
  // rounds; from then on the others go on without this rank.
  ~Experts();
  Experts(const Experts&) = delete;
  Experts& operator=(const Experts&) = delete;

  int rank() const;
  int ranks() const;
  int first_expert() const;  // of this rank
  int local_experts() const;
  const ExpertsOptions& options() const;
  size_t bytes() const;  // of this rank's windows

  // rows: [tokens][hidden] of `type`; chosen: [tokens][top_k]. InvalidArgument: too many or
  // negative tokens, another number of choices, an expert that is not there or twice at one token,
  // null or device memory. ResourceExhausted: more tokens for an expert than `capacity`.
  // FailedPrecondition: in_flight rounds are open.
  absl::StatusOr<Work> dispatch_async(const void* rows, int tokens,
                                      absl::Span<const int32_t> chosen);
  // After wait() or test() has told the good end of this dispatch.
  absl::StatusOr<ExpertRows> received(Work dispatch) const;
  // Ends the round of `dispatch`. weights: [tokens][top_k], beside the choices; those of -1 are not
  // read. out: [tokens][hidden] of `type`. InvalidArgument: other sizes; FailedPrecondition: that
  // dispatch has not ended, or is combined already.
  absl::StatusOr<Work> combine_async(Work dispatch, absl::Span<const float> weights, void* out,
                                     size_t out_bytes);

  // Blocks until the call has ended and returns how. DeadlineExceeded with "still runs" in its
  // text: not within `timeout`; it can be waited for again.
  absl::Status wait(Work work, Time timeout = kNever);
  // Advances, does not block: nullopt while the call runs, then how it ended.
  std::optional<absl::Status> test(Work work);

  // The same, waited for.
  absl::StatusOr<ExpertRows> dispatch(const void* rows, int tokens,
                                      absl::Span<const int32_t> chosen);
  absl::Status combine(const ExpertRows& rows, absl::Span<const float> weights, void* out,
                       size_t out_bytes);

  // The ranks whose part that call went without, ascending, once it has ended; until in_flight more
  // rounds have begun.
  std::vector<int> missing(Work work) const;
  // All that are masked.
  std::vector<int> masked() const;
  // Text for people: the route to each rank, and the bytes sent.
  std::string explain() const;

  // One row of fp8 as f32: `elements` e4m3 values times their blocks' scales.
  static void dequantise(const std::byte* row, const float* scales, size_t elements, float* out);

 private:
  class Impl;
  friend class SteppedExperts;  // of tests in virtual time, where nothing may block
  explicit Experts(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace baton
