// KV plans over an agent: an engine that keeps its paged KV cache in memory of its own moves blocks
// of it to and from the cache of another engine, however differently the two lay out theirs.
//
//   auto mine = KvPlacement::of(my_layout, {{address, bytes, 0}, ...});  // registered with `agent`
//   auto theirs = KvPlacement::decode(bytes_of_the_other_engine);        // what its encode() gave
//   auto plan = AgentKvPlan::make(*agent, Op::kRead, *mine, "prefill", *theirs);
//   auto move = plan->make_transfer(*agent, {.local = {{blocks_here}}, .remote = {{blocks_there}}},
//                                   "request 5");
//   agent->post(*move);
//   absl::Status status = agent->wait(*move);
//
// What a plan does with two layouts is described in kvtransfer/kv_plan.h: layers and heads that
// both hold move, whatever the tensor-parallel degrees, block sizes and orders of dimensions. With
// Op::kWrite this agent's cache is the plan's source, with Op::kRead its target. The transfer is
// one of the agent's: it is posted, waited for, aborted and released as every other one, and
// posting it reads no list again and allocates nothing.
//
// Where several engines hold the heads of one, each pair of them has a plan of its own.
//
// Bytes move as they are: element types are the same on both sides. Where they are not, convert at
// one end first, by a kernel of the engine's.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvtransfer/agent.h"
#include "kvtransfer/kv_layout.h"
#include "kvtransfer/kv_plan.h"

namespace baton::kvtransfer {

// A layout, and where its buffers lie in the process that owns them.
struct KvPlacement {
  KvLayout layout;
  std::vector<uint64_t> addresses;  // of layout.buffers

  // A layout whose buffers are these, in order: their sizes and devices become the layout's.
  // `kind`: kDram or kVram. InvalidArgument where there are more or fewer than the layout has,
  // where one is smaller than what lies in it, and what KvLayout::check() says.
  static absl::StatusOr<KvPlacement> of(KvLayout layout, absl::Span<const Descriptor> buffers,
                                        MemoryKind kind = MemoryKind::kDram);
  // A layout of one group whose fields begin at addresses: addresses[f][l] is where layer number l
  // of the group has the first element of its field f, somewhere in one of `buffers`.
  // KvField::places are not read.
  static absl::StatusOr<KvPlacement> of_addresses(
      KvGroup group, absl::Span<const absl::Span<const uint64_t>> addresses,
      absl::Span<const Descriptor> buffers, MemoryKind kind = MemoryKind::kDram);
  // Puts the groups and buffers of another one, of other layers of the model, behind these. Its
  // model and format are not taken. Nothing changes unless it returns OK.
  absl::Status append(const KvPlacement& other);

  // KvLayout::check(), and an address for each buffer.
  absl::Status check() const;
  // For another engine, by whatever means the two have. It says what lies where, and gives access
  // to nothing: the agent's metadata does. decode() finds out what was damaged on the way, or is of
  // another release (DataLoss), and returns only what passes check().
  std::string encode() const;
  static absl::StatusOr<KvPlacement> decode(std::string_view bytes);
};

// Where one side keeps a sequence, in one group of layers: blocks[i] is the block of its cache that
// holds the sequence's block first_block + i, in blocks of that side's size.
struct AgentKvBlocks {
  absl::Span<const int64_t> blocks;
  uint64_t first_block = 0;
};

// What a transfer moves of a sequence.
struct AgentKvRequest {
  static constexpr uint64_t kAll = KvPlan::kAllLayers.end;

  // Those of the sequence. An end of kAll: as many as the blocks of both sides hold. Rounded
  // outwards to what both block sizes can divide; blocks of equal size move whole.
  KvTokens tokens{0, kAll};
  // Tokens of the whole sequence, from whose end a sliding window counts; 0: the end of `tokens`,
  // or where that is open the end of the last block of the group that reaches furthest.
  uint64_t length = 0;
  // The model's numbers of the layers that move: [first, end).
  KvTokens layers = KvPlan::kAllLayers;
  // One for each group of that side's layout. They are copied. Blocks of the source may be named
  // again; one of the target that is named twice holds a mixture of both.
  std::vector<AgentKvBlocks> local;
  std::vector<AgentKvBlocks> remote;
};

// A plan between a layout in this agent's memory and one in another's. A value: copies share what
// is inside, and const calls may come from any thread. It needs neither of the two placements any
// more, and may outlive its agent.
class AgentKvPlan {
 public:
  // The remote agent's metadata has to be loaded, and every buffer of both sides has to lie within
  // one registered range (NotFound names the first that does not). `share`, of the source: which of
  // its heads move, where several hold the same (kv_plan.h). FailedPrecondition, with the
  // difference and the remedy, where the two are not of one model or do not fit each other.
  static absl::StatusOr<AgentKvPlan> make(Agent& agent, Op op, const KvPlacement& local,
                                          std::string_view remote_agent, const KvPlacement& remote,
                                          const KvShare& share = {});

  const KvPlan& plan() const;
  // As KvPlan::complete(), of the two layouts.
  bool complete() const;
  Op op() const;
  const std::string& remote_agent() const;

  // A transfer of the agent that the plan was made with, not posted yet; costs a few ns a block.
  // Where nothing of the request is for both sides, it moves nothing and is done at once.
  // InvalidArgument: a block that the cache does not have, fewer blocks than the tokens need, a
  // list too many or too few, another agent's plan. NotFound: the remote agent was removed, or
  // another one has its name. `message` reaches the other agent when all bytes are there.
  absl::StatusOr<AgentTransferId> make_transfer(Agent& agent, const AgentKvRequest& request,
                                                std::string_view message = {}) const;

 private:
  struct Inside;
  static absl::StatusOr<AgentKvPlan> bind(Agent& agent, std::shared_ptr<Inside> inside,
                                          const KvPlacement& local, std::string_view remote_agent,
                                          const KvPlacement& remote);
  explicit AgentKvPlan(std::shared_ptr<const Inside> inside) : inside_(std::move(inside)) {}
  std::shared_ptr<const Inside> inside_;
};

}  // namespace baton::kvtransfer
