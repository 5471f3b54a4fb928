// The C interface: layouts of KV caches, and plans between two of them.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "capi/agent_handle.h"
#include "kvtransfer/agent_kv.h"
#include "kvtransfer/kv_packing.h"

using namespace baton::capi;
using baton::kvtransfer::AgentKvBlocks;
using baton::kvtransfer::AgentKvPlan;
using baton::kvtransfer::AgentKvRequest;
using baton::kvtransfer::KvDtype;
using baton::kvtransfer::KvField;
using baton::kvtransfer::KvGroup;
using baton::kvtransfer::KvHeads;
using baton::kvtransfer::KvLayout;
using baton::kvtransfer::KvPart;
using baton::kvtransfer::KvPlacement;
using baton::kvtransfer::KvRole;
using baton::kvtransfer::KvShape;
using baton::kvtransfer::KvShare;

struct baton_kv_plan {
  AgentKvPlan plan;
};

namespace {

constexpr char kNoLayout[] =
    "layout is NULL: pass what baton_kv_layout_create() or baton_kv_layout_decode() made";
constexpr char kNoGroup[] = "group: set its size to sizeof(baton_kv_group)";

// Numbers that are none become 0, which KvLayout::check() refuses by its number.
KvDtype dtype_of(int32_t number) {
  return static_cast<KvDtype>(number < 0 || number > 255 ? 0 : number);
}
KvRole role_of(int32_t number) {
  return static_cast<KvRole>(number < 0 || number > 255 ? 0 : number);
}

// All but the fields.
absl::StatusOr<KvGroup> group_of(const baton_kv_group& from) {
  if (from.layer_count > KvLayout::kMaxLayers) {
    return absl::InvalidArgumentError("too many layers: layer_count is at most 4096");
  }
  KvGroup out;
  out.layers.resize(from.layer_count);
  if (from.layers == nullptr) {
    std::iota(out.layers.begin(), out.layers.end(), 0u);
  } else {
    out.layers.assign(from.layers, from.layers + from.layer_count);
  }
  out.blocks = from.blocks;
  out.block_tokens = from.block_tokens;
  out.window = from.window;
  out.total_heads = from.total_heads;
  out.first_head = from.first_head;
  out.heads = from.heads;
  return out;
}

// The one group of `shape`, with the layers and the window of `group`.
KvLayout with_layers(KvLayout shape, const KvGroup& group) {
  shape.groups[0].layers = group.layers;
  shape.groups[0].window = group.window;
  return shape;
}

// place(group): a KvPlacement of that group alone.
template <typename Place>
int32_t add(baton_kv_layout* layout, const baton_kv_group* group, baton_error* error,
            Place&& place) {
  if (layout == nullptr) return invalid(kNoLayout, error);
  baton_kv_group known{};
  if (!read_sized(group, known)) return invalid(kNoGroup, error);
  return caught(error, [&] {
    const absl::StatusOr<KvGroup> wanted = group_of(known);
    if (!wanted.ok()) return wanted.status();
    const absl::StatusOr<KvPlacement> more = place(*wanted);
    if (!more.ok()) return more.status();
    return layout->cache.append(*more);
  });
}

// A list that is not there is empty, which no request can be.
std::vector<AgentKvBlocks> lists(const baton_kv_blocks* from, size_t count) {
  std::vector<AgentKvBlocks> out;
  for (const baton_kv_blocks& one : absl::MakeConstSpan(from, count)) {
    out.push_back(
        {{one.blocks, is_missing(one.blocks, one.count) ? 0 : one.count}, one.first_block});
  }
  return out;
}

// BATON_ERR_NOT_ALLOWED would be of memory.
absl::Status mismatch(const absl::Status& status) {
  return absl::IsFailedPrecondition(status) ? absl::DataLossError(status.message()) : status;
}

absl::StatusOr<KvShare> share_of(const baton_kv_share* share) {
  baton_kv_share known{sizeof known, 1, 0, 0};
  if (share != nullptr && !read_sized(share, known)) {
    return absl::InvalidArgumentError("share: set its size to sizeof(baton_kv_share)");
  }
  if (known.ranks == 0 || known.rank >= known.ranks) {
    return absl::InvalidArgumentError("share: rank must be less than ranks");
  }
  return KvShare{known.ranks, known.rank, known.turn};
}

}  // namespace

extern "C" {

int32_t baton_kv_layout_create(const baton_kv_model* model, baton_kv_layout** out,
                               baton_error* error) {
  if (!cleared(out)) return invalid(kNoHandle, error);
  baton_kv_model known{};
  if (!read_sized(model, known)) {
    return invalid("model: set its size to sizeof(baton_kv_model)", error);
  }
  if (view(known.weights).empty()) {
    return invalid(
        "the model has no name: set `weights` to a hash over its weights and config, so that the "
        "KV of another model is refused",
        error);
  }
  return caught(error, [&] {
    auto made = std::make_unique<baton_kv_layout>();
    KvLayout& layout = made->cache.layout;
    layout.model = {std::string(view(known.weights)), std::string(view(known.dtype)),
                    std::string(view(known.rope))};
    layout.format = view(known.format);
    *out = made.release();
  });
}

void baton_kv_layout_destroy(baton_kv_layout* layout) { delete layout; }

int32_t baton_kv_layout_add_paged(baton_kv_layout* layout, int32_t memory,
                                  const baton_descriptor* buffers, size_t buffer_count,
                                  const baton_kv_group* group, const baton_kv_paged* paged,
                                  baton_error* error) {
  if (is_missing(buffers, buffer_count)) return missing(error);
  baton_kv_paged how{};
  if (!read_sized(paged, how)) {
    return invalid("paged: set its size to sizeof(baton_kv_paged)", error);
  }
  if (how.order < BATON_KV_NHD || how.order > BATON_KV_HND || how.pair < BATON_KV_SPLIT ||
      how.pair > BATON_KV_JOINED) {
    return invalid("order and pair must be values of baton_kv_order and baton_kv_pair", error);
  }
  return add(layout, group, error, [&](const KvGroup& g) {
    const KvShape shape{static_cast<uint32_t>(g.layers.size()),
                        g.blocks,
                        g.block_tokens,
                        g.total_heads,
                        g.first_head,
                        g.heads,
                        how.head_size,
                        dtype_of(how.dtype)};
    return KvPlacement::of(
        with_layers(KvLayout::paged(shape, static_cast<KvLayout::Order>(how.order),
                                    static_cast<KvLayout::Pair>(how.pair), how.one_tensor == 0),
                    g),
        descriptors(buffers, buffer_count), kind(memory));
  });
}

int32_t baton_kv_layout_add_latent(baton_kv_layout* layout, int32_t memory,
                                   const baton_descriptor* buffers, size_t buffer_count,
                                   const baton_kv_group* group, uint32_t width, int32_t dtype,
                                   baton_error* error) {
  if (is_missing(buffers, buffer_count)) return missing(error);
  return add(layout, group, error, [&](const KvGroup& g) {
    return KvPlacement::of(
        with_layers(KvLayout::latent(static_cast<uint32_t>(g.layers.size()), g.blocks,
                                     g.block_tokens, width, dtype_of(dtype)),
                    g),
        descriptors(buffers, buffer_count), kind(memory));
  });
}

int32_t baton_kv_layout_add_fields(baton_kv_layout* layout, int32_t memory,
                                   const baton_descriptor* buffers, size_t buffer_count,
                                   const baton_kv_group* group, const baton_kv_field* fields,
                                   size_t field_count, baton_error* error) {
  if (is_missing(buffers, buffer_count) || is_missing(fields, field_count)) return missing(error);
  return add(layout, group, error, [&](KvGroup g) {
    std::vector<absl::Span<const uint64_t>> addresses;
    for (size_t i = 0; i < field_count && i <= KvLayout::kMaxFields; ++i) {
      const baton_kv_field& from = fields[i];
      KvField& field = g.fields.emplace_back();
      field.role = role_of(from.role);
      field.dtype = dtype_of(from.dtype);
      field.width = from.width;
      field.per_block = from.per_block != 0;
      field.block_stride = from.block_stride;
      field.token_stride = from.token_stride;
      field.head_stride = from.head_stride;
      field.element_stride = from.element_stride;
      addresses.emplace_back(from.addresses, from.addresses == nullptr ? 0 : g.layers.size());
    }
    return KvPlacement::of_addresses(std::move(g), addresses, descriptors(buffers, buffer_count),
                                     kind(memory));
  });
}

int32_t baton_kv_layout_add_packed(baton_kv_layout* layout, int32_t memory,
                                   const baton_descriptor* buffers, size_t buffer_count,
                                   const baton_kv_group* group, const char* packing,
                                   uint64_t block_stride, baton_error* error) {
  if (is_missing(buffers, buffer_count)) return missing(error);
  return add(layout, group, error, [&](const KvGroup& g) {
    return baton::kvtransfer::place_packed(view(packing), g, descriptors(buffers, buffer_count),
                                           block_stride, kind(memory));
  });
}

int32_t baton_kv_find_packing(const int64_t* block, size_t count, uint32_t tokens, uint32_t heads,
                              uint32_t elements, baton_bytes* out, baton_error* error) {
  give_nothing(out);
  if (is_missing(block, count)) return missing(error);
  return caught(error, [&] {
    return give_made(baton::kvtransfer::find_packing({block, count}, tokens, heads, elements), out);
  });
}

int32_t baton_kv_shard_heads(uint32_t total_heads, uint32_t ranks, uint32_t rank,
                             uint32_t* first_head, uint32_t* heads, baton_error* error) {
  give_nothing(first_head, heads);
  if (total_heads == 0 || rank >= ranks || first_head == nullptr || heads == nullptr) {
    return invalid("rank must be less than ranks, heads more than 0, and out not NULL", error);
  }
  const KvHeads held = baton::kvtransfer::shard_heads(total_heads, ranks, rank);
  *first_head = held.first;
  *heads = held.end - held.first;
  return result_of(absl::OkStatus(), error);
}

int32_t baton_kv_ranks_heard(uint32_t total_heads, uint32_t sources, uint32_t targets,
                             uint32_t rank, uint32_t* out, size_t room, size_t* count,
                             baton_error* error) {
  give_nothing(count);
  constexpr uint32_t kMostRanks = 512;
  if (total_heads == 0 || sources == 0 || rank >= targets || sources > kMostRanks ||
      targets > kMostRanks) {
    return invalid(
        "rank must be less than targets, with 1 to 512 ranks on each side and heads more than 0",
        error);
  }
  if (count == nullptr || (out == nullptr && room > 0)) {
    return invalid("count, or out, is NULL: pass the address for the numbers", error);
  }
  return caught(error, [&] {
    give_list(baton::kvtransfer::ranks_heard(total_heads, sources, targets, rank), out, room,
              count);
  });
}

int32_t baton_kv_layout_get_group(const baton_kv_layout* layout, size_t number, baton_kv_group* out,
                                  baton_error* error) {
  if (layout == nullptr) return invalid(kNoLayout, error);
  const auto& groups = layout->cache.layout.groups;
  if (number >= groups.size()) {
    return result_of(absl::NotFoundError("the layout has no group of that number"), error);
  }
  const KvGroup& group = groups[number];
  baton_kv_group all{};
  all.layers = group.layers.data();
  all.layer_count = group.layers.size();
  all.blocks = group.blocks;
  all.block_tokens = group.block_tokens;
  all.window = group.window;
  all.total_heads = group.total_heads;
  all.first_head = group.first_head;
  all.heads = group.heads;
  return give_sized(all, out, kNoGroup, error);
}

int32_t baton_kv_layout_encode(const baton_kv_layout* layout, baton_bytes* out,
                               baton_error* error) {
  give_nothing(out);
  if (layout == nullptr) return invalid(kNoLayout, error);
  return caught(error, [&] {
    const absl::Status good = layout->cache.check();
    return good.ok() ? give(layout->cache.encode(), out) : good;
  });
}

int32_t baton_kv_layout_decode(const void* bytes, size_t size, baton_kv_layout** out,
                               baton_error* error) {
  if (!cleared(out)) return invalid(kNoHandle, error);
  if (bytes != nullptr && is_missing(bytes, size)) return missing(error);
  return caught(error, [&] {
    auto cache = KvPlacement::decode(view(bytes, size));
    if (!cache.ok()) return cache.status();
    *out = new baton_kv_layout{*std::move(cache)};
    return absl::OkStatus();
  });
}

int32_t baton_kv_plan_create(baton_agent* agent, int32_t op, const baton_kv_layout* local,
                             const char* remote, const baton_kv_layout* remote_layout,
                             const baton_kv_share* share, baton_kv_plan** out, baton_error* error) {
  if (!cleared(out)) return invalid(kNoHandle, error);
  const std::optional<baton::Op> which = op_of(op);
  if (!which) return no_such_op(error);
  if (local == nullptr || remote_layout == nullptr) return invalid(kNoLayout, error);
  return guarded(agent, error, [&] {
    const absl::StatusOr<KvShare> known = share_of(share);
    if (!known.ok()) return known.status();
    auto plan = AgentKvPlan::make(*agent->agent, *which, local->cache, view(remote),
                                  remote_layout->cache, *known);
    if (!plan.ok()) return mismatch(plan.status());
    *out = new baton_kv_plan{*std::move(plan)};
    return absl::OkStatus();
  });
}

void baton_kv_plan_destroy(baton_kv_plan* plan) { delete plan; }

int32_t baton_kv_plan_get_info(const baton_kv_plan* plan, baton_kv_plan_info* out,
                               baton_error* error) {
  if (plan == nullptr) return invalid("plan is NULL: pass what baton_kv_plan_create() made", error);
  baton_kv_plan_info all{};
  for (const KvPart& part : plan->plan.plan().parts()) {
    all.bytes_per_token += part.bytes_per_token() * part.layers.size();
    if (!part.boxes.empty()) all.layers += static_cast<uint32_t>(part.layers.size());
  }
  all.complete = plan->plan.complete() ? 1 : 0;
  return give_sized(all, out, "out: set its size to sizeof(baton_kv_plan_info)", error);
}

int32_t baton_kv_plan_make_transfer(baton_agent* agent, const baton_kv_plan* plan,
                                    const baton_kv_request* request, const void* message,
                                    size_t message_size, baton_transfer* out, baton_error* error) {
  give_nothing(out);
  if (is_missing(message, message_size)) return missing(error);
  if (plan == nullptr) return invalid("plan is NULL: pass what baton_kv_plan_create() made", error);
  baton_kv_request known = BATON_KV_REQUEST_INIT;
  if (!read_sized(request, known)) {
    return invalid("request: fill it in with BATON_KV_REQUEST_INIT", error);
  }
  if (is_missing(known.local, known.local_groups) ||
      is_missing(known.remote, known.remote_groups)) {
    return missing(error);
  }
  return guarded(agent, error, [&] {
    AgentKvRequest wanted;
    wanted.tokens = {known.first_token, known.end_token};
    wanted.length = known.length;
    wanted.layers = {known.first_layer, known.end_layer};
    wanted.local = lists(known.local, known.local_groups);
    wanted.remote = lists(known.remote, known.remote_groups);
    return give_id(
        [&] {
          return plan->plan.make_transfer(*agent->agent, wanted, view(message, message_size));
        },
        out);
  });
}

}  // extern "C"
