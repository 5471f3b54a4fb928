// The C interface: experts.
#include "collectives/experts.h"

#include <memory>
#include <vector>

#include "capi/comm_handle.h"
#include "capi/include/baton/experts.h"

using baton::Experts;
using baton::ExpertsOptions;
using baton::Work;
using namespace baton::capi;

struct baton_experts {
  const baton::base::MadeHere made_here;
  std::unique_ptr<Experts> experts;
};

namespace {

// The one is handed out as the other.
static_assert(sizeof(baton_expert_group) == sizeof(baton::ExpertGroup) &&
              offsetof(baton_expert_group, first) == offsetof(baton::ExpertGroup, first) &&
              offsetof(baton_expert_group, count) == offsetof(baton::ExpertGroup, count));

// body(experts)
template <typename Body>
int32_t with_experts(const baton_experts* handle, baton_error* error, Body&& body) {
  return with_own(handle, "experts is NULL: pass what baton_experts_create() made",
                  "experts belong to the process that this one was forked from: make others", error,
                  [&] { return body(*handle->experts); });
}

int32_t begun(const absl::StatusOr<Work>& started, baton_work* work, baton_error* error) {
  if (started.ok()) *work = started->sequence;
  return result_of(started.status(), error);
}

}  // namespace

extern "C" {

int32_t baton_experts_create(baton_comm* comm, const baton_experts_options* options,
                             baton_experts** out, baton_error* error) {
  if (!cleared(out)) return invalid(kNoHandle, error);
  baton_experts_options all = BATON_EXPERTS_OPTIONS_INIT;
  if (!read_sized(options, all)) {
    return invalid("options: set it to BATON_EXPERTS_OPTIONS_INIT first", error);
  }
  if (all.mode < BATON_EXPERTS_AUTO || all.mode > BATON_EXPERTS_THROUGHPUT) {
    return invalid("options.mode: this library knows no such one: see baton_experts_mode", error);
  }
  return with(comm, error, [&](baton::Communicator& group) {
    ExpertsOptions own;
    own.experts = all.experts;
    own.top_k = all.top_k;
    own.hidden = all.hidden;
    own.max_tokens = all.max_tokens;
    own.type = static_cast<baton::DataType>(all.type & 0xff);
    if (all.type < 0 || all.type >= baton::kDataTypes)
      own.type = baton::DataType::kBool;  // refused
    own.fp8 = all.fp8 != 0;
    own.capacity = all.capacity;
    own.in_flight = all.in_flight == 0 ? 1 : all.in_flight;
    own.mode = static_cast<baton::ExpertsMode>(all.mode);
    set_time(all.rank_timeout, own.rank_timeout);
    auto made = Experts::create(group, own);
    if (!made.ok()) return ended(made.status());
    auto handle = std::make_unique<baton_experts>();
    handle->experts = *std::move(made);
    *out = handle.release();
    return absl::OkStatus();
  });
}

void baton_experts_destroy(baton_experts* experts) { delete experts; }

int32_t baton_experts_dispatch(baton_experts* experts, const void* rows, int32_t tokens,
                               const int32_t* chosen, uint64_t choices, baton_work* work,
                               baton_error* error) {
  if (!cleared(work)) return invalid("work is NULL: pass the address for its number", error);
  if (chosen == nullptr && choices > 0) return invalid("chosen is NULL", error);
  return with_experts(experts, error, [&](Experts& of) {
    return begun(of.dispatch_async(rows, tokens, {chosen, static_cast<size_t>(choices)}), work,
                 error);
  });
}

int32_t baton_experts_received(const baton_experts* experts, baton_work dispatch,
                               baton_expert_rows* out, baton_error* error) {
  if (out == nullptr || out->size != sizeof *out) {
    return invalid("out: set it to BATON_EXPERT_ROWS_INIT first", error);
  }
  *out = BATON_EXPERT_ROWS_INIT;
  return with_experts(experts, error, [&](Experts& of) {
    const auto rows = of.received({dispatch});
    if (!rows.ok()) return rows.status();
    out->groups = reinterpret_cast<const baton_expert_group*>(rows->groups.data());
    out->group_count = rows->groups.size();
    out->row_of = rows->row_of.data();
    out->slots = rows->row_of.size();
    out->rows = rows->rows;
    out->row_stride = rows->row_stride;
    out->scales_offset = rows->scales_offset;
    out->outputs = rows->outputs;
    out->output_stride = rows->output_stride;
    return absl::OkStatus();
  });
}

int32_t baton_experts_combine(baton_experts* experts, baton_work dispatch, const float* weights,
                              uint64_t count, void* out, uint64_t out_bytes, baton_work* work,
                              baton_error* error) {
  if (!cleared(work)) return invalid("work is NULL: pass the address for its number", error);
  if (weights == nullptr && count > 0) return invalid("weights is NULL", error);
  return with_experts(experts, error, [&](Experts& of) {
    return begun(of.combine_async({dispatch}, {weights, static_cast<size_t>(count)}, out,
                                  static_cast<size_t>(out_bytes)),
                 work, error);
  });
}

int32_t baton_experts_wait(baton_experts* experts, baton_work work, int64_t timeout,
                           baton_error* error) {
  return with_experts(experts, error,
                      [&](Experts& of) { return ended_by(of.wait({work}, timeout_of(timeout))); });
}

int32_t baton_experts_test(baton_experts* experts, baton_work work, baton_error* error) {
  return with_experts(experts, error, [&](Experts& of) {
    const auto result = of.test({work});
    return result ? result_of(ended_by(*result), error) : int32_t{BATON_IN_PROGRESS};
  });
}

int32_t baton_experts_missing(const baton_experts* experts, baton_work work, int32_t* ranks,
                              size_t room, size_t* count, baton_error* error) {
  if (!cleared(count)) return invalid("count is NULL: pass the address for the number", error);
  return with_experts(experts, error, [&](Experts& of) {
    give_list(work == 0 ? of.masked() : of.missing({work}), ranks, room, count);
  });
}

void baton_experts_dequantise(const void* row, const float* scales, uint64_t elements, float* out) {
  Experts::dequantise(static_cast<const std::byte*>(row), scales, static_cast<size_t>(elements),
                      out);
}

}  // extern "C"
