// KV plans over an agent: the buffers of two layouts found in registered memory, and requests made
// into transfers, as those between two prepared lists are.
#include "kvtransfer/agent_kv.h"

#include <algorithm>
#include <new>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kvtransfer/internal/agent_impl.h"
#include "kvtransfer/kv_plan.h"
#include "kvtransfer/plans/kv_boxes.h"
#include "kvtransfer/plans/kv_extents.h"
#include "transport/layout.h"
#include "transport/region.h"
#include "transport/transfer.h"

namespace baton::kvtransfer {
namespace {

// A buffer of a layout, where this process has registered it.
struct KvLocalBuffer {
  MemoryRegion region;
  uint64_t offset = 0;  // where the buffer begins in the region
};
// A buffer of a layout, as a peer reaches it.
struct KvRemoteBuffer {
  RemoteRegion region;
  uint64_t offset = 0;
};

// Which buffers a move touches, for whoever starts it: a write is from the plan's source, a read
// into its target.
uint32_t local_buffer(Op op, const KvMove& move) {
  return op == Op::kWrite ? move.source_buffer : move.target_buffer;
}
uint32_t remote_buffer(Op op, const KvMove& move) {
  return op == Op::kWrite ? move.target_buffer : move.source_buffer;
}

// A layout in a buffer as one in the region that holds the buffer, `bytes` further on.
Layout shifted(const Layout& layout, uint64_t bytes) {
  return Layout::box(layout.offset() + bytes, layout.dims(), layout.piece_bytes());
}

// Fills in both sides of a transfer, which has these four fields.
template <typename Transfer>
void set_sides(Transfer& transfer, Op op, const KvMove& move, const KvLocalBuffer& local,
               const KvRemoteBuffer& remote) {
  const bool write = op == Op::kWrite;
  transfer.local = local.region;
  transfer.local_layout = shifted(write ? move.source : move.target, local.offset);
  transfer.remote = remote.region;
  transfer.remote_layout = shifted(write ? move.target : move.source, remote.offset);
}

// Where the buffers of one side lie in what is registered. `whose`: the agent.
template <typename Buffer, typename Region>
absl::StatusOr<std::vector<Buffer>> find_buffers(const KvPlacement& side,
                                                 const AgentMemoryTables<Region>& registered,
                                                 std::string_view whose) {
  std::vector<Buffer> out;
  const typename AgentRanges<Region>::Range* hint = nullptr;
  MemoryKind last = MemoryKind::kDram;
  for (size_t i = 0; i < side.addresses.size(); ++i) {
    const KvBuffer& buffer = side.layout.buffers[i];
    const MemoryKind kind =
        buffer.device == KvDevice::kCuda ? MemoryKind::kVram : MemoryKind::kDram;
    if (kind != last) hint = nullptr;
    last = kind;
    hint = registered.of(kind)->cover(side.addresses[i], buffer.bytes, buffer.device_index, hint);
    if (hint == nullptr) {
      return absl::NotFoundError(absl::StrFormat(
          "buffer %u of the layout (%u bytes at %#x, device %u) is not within one registered %s "
          "range of %s: register the memory first, and load the metadata again if it is another "
          "agent's",
          i, buffer.bytes, side.addresses[i], buffer.device_index, kind_name(kind), whose));
    }
    out.push_back({hint->region, side.addresses[i] - hint->where.address});
  }
  return out;
}

// Copies the block numbers of one side, a list for each of its groups.
absl::Status add_pages(const char* side, const KvLayout& layout,
                       const std::vector<AgentKvBlocks>& lists,
                       std::vector<std::vector<uint32_t>>& pages) {
  if (lists.size() != layout.groups.size()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%u lists of %s blocks for the %u groups of layers of that layout: one for "
                        "each",
                        lists.size(), side, layout.groups.size()));
  }
  for (size_t g = 0; g < lists.size(); ++g) {
    const absl::Span<const int64_t> blocks = lists[g].blocks;
    if (lists[g].first_block > UINT32_MAX) {
      return absl::InvalidArgumentError(
          absl::StrFormat("the first %s block of group %u would be number %u of the sequence", side,
                          g, lists[g].first_block));
    }
    std::vector<uint32_t>& copy = pages.emplace_back(blocks.size());
    for (size_t i = 0; i < blocks.size(); ++i) {
      if (static_cast<uint64_t>(blocks[i]) >= layout.groups[g].blocks) {
        return absl::InvalidArgumentError(
            absl::StrFormat("%s block %u of group %u is %d, but that cache has %u blocks", side, i,
                            g, blocks[i], layout.groups[g].blocks));
      }
      copy[i] = static_cast<uint32_t>(blocks[i]);
    }
  }
  return absl::OkStatus();
}

// Tokens of the sequence for which a side has blocks.
KvTokens held(const KvGroup& group, const AgentKvBlocks& side) {
  const auto tokens = [&](uint64_t blocks) { return saturating_mul(blocks, group.block_tokens); };
  return {tokens(side.first_block), tokens(side.first_block + side.blocks.size())};
}

// A part's layers among those that were asked for, as indices.
KvTokens layers_of(const KvPart& part, KvTokens wanted) {
  const auto index = [&](uint64_t number) {
    return static_cast<uint64_t>(
        std::lower_bound(part.layers.begin(), part.layers.end(), number,
                         [](const KvPart::Layer& layer, uint64_t n) { return layer.layer < n; }) -
        part.layers.begin());
  };
  return {index(wanted.begin), index(wanted.end)};
}

}  // namespace

struct AgentKvPlan::Inside {
  Op op = Op::kWrite;
  KvPlan plan;
  WorkerUid owner;  // the agent's
  std::string remote_agent;
  uint64_t epoch = 0;  // of its metadata
  std::vector<KvLocalBuffer> local;
  std::vector<KvRemoteBuffer> remote;

  bool writes() const { return op == Op::kWrite; }
  const KvLayout& local_layout() const { return writes() ? plan.source() : plan.target(); }
  const KvLayout& remote_layout() const { return writes() ? plan.target() : plan.source(); }

  // The lists of a request that a part is moved by.
  const AgentKvBlocks& source(const KvPart& part, const AgentKvRequest& request) const {
    return (writes() ? request.local : request.remote)[part.source_group];
  }
  const AgentKvBlocks& target(const KvPart& part, const AgentKvRequest& request) const {
    return (writes() ? request.remote : request.local)[part.target_group];
  }
  // The tokens of a part: those requested; without an end, up to where both sides have blocks.
  KvTokens tokens_of(const KvPart& part, const AgentKvRequest& request) const;
  // The numbers of parts that move, with their tokens.
  template <typename Sink>
  absl::Status for_each_part(const AgentKvRequest& request, Sink&& sink) const;
  absl::Status add_parts(const AgentKvRequest& request, AgentPlan& out) const;
  absl::StatusOr<AgentPlan> made_of(const AgentKvRequest& request) const;
};

KvTokens AgentKvPlan::Inside::tokens_of(const KvPart& part, const AgentKvRequest& request) const {
  if (request.tokens.end != AgentKvRequest::kAll) return request.tokens;
  const KvTokens from = held(plan.source().groups[part.source_group], source(part, request));
  const KvTokens to = held(plan.target().groups[part.target_group], target(part, request));
  KvTokens out{std::max({request.tokens.begin, from.begin, to.begin}), std::min(from.end, to.end)};
  if (request.length != 0) out.end = std::min(out.end, request.length);
  return out;
}

template <typename Sink>
absl::Status AgentKvPlan::Inside::for_each_part(const AgentKvRequest& request, Sink&& sink) const {
  uint64_t length = request.length;
  for (const KvPart& part : plan.parts()) {
    if (request.length == 0) length = std::max(length, tokens_of(part, request).end);
  }
  for (size_t p = 0; p < plan.parts().size(); ++p) {
    const KvPart& part = plan.parts()[p];
    absl::Status status = sink(p, part.kept(tokens_of(part, request), length));
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status AgentKvPlan::Inside::add_parts(const AgentKvRequest& request, AgentPlan& out) const {
  const size_t locals = request.local.size();
  return for_each_part(request, [&](size_t p, KvTokens tokens) {
    const KvPart& part = plan.parts()[p];
    const size_t from = part.source_group + (writes() ? 0 : locals);
    const size_t to = part.target_group + (writes() ? locals : 0);
    return plan.for_each_move(p, tokens, {source(part, request).first_block, out.pages[from]},
                              {target(part, request).first_block, out.pages[to]},
                              layers_of(part, request.layers), [&](const KvMove& move) {
                                AgentPart& one = out.parts.emplace_back();
                                set_sides(one, op, move, local[local_buffer(op, move)],
                                          remote[remote_buffer(op, move)]);
                                one.local_layout = one.local_layout.measured();
                                one.remote_layout = one.remote_layout.measured();
                                out.bytes += move.source.bytes();
                                out.descriptors += move.source.bytes() / move.source.piece_bytes();
                                return absl::OkStatus();
                              });
  });
}

absl::StatusOr<AgentPlan> AgentKvPlan::Inside::made_of(const AgentKvRequest& request) const {
  if (request.tokens.begin > request.tokens.end || request.layers.begin > request.layers.end) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "tokens [%u, %u) of layers [%u, %u): neither may end before it begins",
        request.tokens.begin, request.tokens.end, request.layers.begin, request.layers.end));
  }
  if (request.length != 0 && request.tokens.end != AgentKvRequest::kAll &&
      request.tokens.end > request.length) {
    return absl::InvalidArgumentError(absl::StrFormat("tokens [%u, %u) of a sequence of %u",
                                                      request.tokens.begin, request.tokens.end,
                                                      request.length));
  }
  try {
    AgentPlan out;
    absl::Status status = add_pages("local", local_layout(), request.local, out.pages);
    if (status.ok()) status = add_pages("remote", remote_layout(), request.remote, out.pages);
    if (status.ok()) status = add_parts(request, out);
    if (!status.ok()) return status;
    return out;
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("no memory for a transfer of this many blocks");
  }
}

absl::StatusOr<AgentKvPlan> AgentKvPlan::bind(Agent& agent, std::shared_ptr<Inside> inside,
                                              const KvPlacement& local,
                                              std::string_view remote_agent,
                                              const KvPlacement& remote) {
  if (absl::Status good = agent.usable(); !good.ok()) return good;
  Agent::Impl& impl = *agent.impl_;
  inside->owner = impl.uid;
  inside->remote_agent = remote_agent;
  std::lock_guard lock(impl.mutex);
  absl::StatusOr<RemoteAgent*> known = impl.find_remote(remote_agent);
  if (!known.ok()) return known.status();
  inside->epoch = (*known)->epoch;
  auto here = find_buffers<KvLocalBuffer>(local, impl.ranges, impl.options.name);
  if (!here.ok()) return here.status();
  inside->local = *std::move(here);
  auto there = find_buffers<KvRemoteBuffer>(remote, (*known)->ranges, remote_agent);
  if (!there.ok()) return there.status();
  inside->remote = *std::move(there);
  return AgentKvPlan(std::move(inside));
}

absl::StatusOr<AgentKvPlan> AgentKvPlan::make(Agent& agent, Op op, const KvPlacement& local,
                                              std::string_view remote_agent,
                                              const KvPlacement& remote, const KvShare& share) {
  if (absl::Status good = check_op(op); !good.ok()) return good;
  for (const KvPlacement* side : {&local, &remote}) {
    if (absl::Status good = side->check(); !good.ok()) return good;
  }
  const bool writes = op == Op::kWrite;
  absl::StatusOr<KvPlan> plan = KvPlan::make(writes ? local.layout : remote.layout,
                                             writes ? remote.layout : local.layout, share);
  if (!plan.ok()) return plan.status();
  auto inside = std::make_shared<Inside>();
  inside->op = op;
  inside->plan = *std::move(plan);
  return bind(agent, std::move(inside), local, remote_agent, remote);
}

const KvPlan& AgentKvPlan::plan() const { return inside_->plan; }
bool AgentKvPlan::complete() const { return inside_->plan.complete(); }
Op AgentKvPlan::op() const { return inside_->op; }
const std::string& AgentKvPlan::remote_agent() const { return inside_->remote_agent; }

absl::StatusOr<AgentTransferId> AgentKvPlan::make_transfer(Agent& agent,
                                                           const AgentKvRequest& request,
                                                           std::string_view message) const {
  if (absl::Status good = agent.usable(); !good.ok()) return good;
  Agent::Impl& impl = *agent.impl_;
  if (impl.uid != inside_->owner) {
    return absl::InvalidArgumentError(
        "the plan was made with another agent: make one with this agent");
  }
  if (absl::Status status = check_message(message); !status.ok()) return status;
  if (absl::Status known = impl.check_epoch(inside_->remote_agent, inside_->epoch, "make the plan");
      !known.ok()) {
    return known;
  }
  absl::StatusOr<AgentPlan> plan = inside_->made_of(request);
  if (!plan.ok()) return plan.status();
  return impl.keep(std::make_shared<AgentWorkerTransfer>(*impl.worker, *impl.outbox, inside_->op,
                                                         *std::move(plan), inside_->remote_agent,
                                                         inside_->epoch, message));
}

}  // namespace baton::kvtransfer
