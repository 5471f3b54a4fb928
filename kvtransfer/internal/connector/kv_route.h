// What a load needs of one prefill worker, and how far that is: which of the worker's blocks, layer
// by layer, which bytes of each go where, and which of decode's blocks are filled.
//
// Prefill has one for each load that it pushes or offers, decode one for each worker it pulls from.
// Both follow from the plan and the request alone. Free of I/O and threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvtransfer/internal/connector/kv_messages.h"
#include "kvtransfer/kv_layout.h"
#include "kvtransfer/kv_plan.h"

namespace baton::kvtransfer {

// A layer of a layout.
struct KvLayerPlace {
  uint32_t layer = 0;  // the model's number
  uint32_t group = 0;
};
// In ascending order: what engines call layer 0, 1, ...
std::vector<KvLayerPlace> layers_of(const KvLayout& layout);

// The plan from prefill's cache to decode's, kept for the next load between the two.
class KvAgreement {
 public:
  // What KvPlan::make() says; FailedPrecondition, with the remedy, where the plan leaves out some
  // of what its source owes.
  absl::StatusOr<std::shared_ptr<const KvPlan>> plan(const KvLayout& source, const KvLayout& target,
                                                     const KvShare& share);

 private:
  KvShare share_;
  std::shared_ptr<const KvPlan> plan_;
};

struct KvRoute {
  struct Layer {
    KvBlockRange blocks;   // of the source, that are needed
    size_t pages = 0;      // where they are in `pages`
    size_t part = 0;       // of the plan
    uint32_t index = 0;    // of the layer in it
    uint32_t counter = 0;  // decode's number for the layer
    KvTokens tokens;       // that are needed
  };
  static constexpr uint32_t kNotSaved = UINT32_MAX;

  std::shared_ptr<const KvPlan> plan;
  std::vector<Layer> layers;        // of the source
  std::vector<uint32_t> pages;      // the source's that hold the blocks, layer after layer
  uint64_t saved = 0;               // entries of `pages` that are set
  uint64_t bytes = 0;               // that are needed
  uint64_t landed = 0;              // of them, those that are at decode
  std::vector<uint64_t> landed_in;  // each of request.blocks

  bool all_saved() const { return saved == pages.size(); }

  // Lays out what `request` needs; nothing is saved or has landed.
  void begin(std::shared_ptr<const KvPlan> new_plan, const KvLoadRequest& request);
  // The source has these blocks of a layer, from the sequence's block `first_block` on. Calls
  // on_run(blocks) for each row of them that is needed and that it has not said before.
  void save(uint32_t layer, uint64_t first_block, absl::Span<const uint32_t> blocks,
            absl::FunctionRef<void(KvBlockRange)> on_run);
  // The moves of these blocks of the source, all of them saved: what they hold of the tokens that
  // are needed. Their page lists lie here and in the request.
  absl::Status for_each_move(uint32_t layer, KvBlockRange blocks, const KvLoadRequest& request,
                             absl::FunctionRef<absl::Status(const KvMove&)> sink) const;
  // Notes which of decode's blocks the move has filled, and how far.
  void count(uint32_t layer, const KvMove& move, const KvLoadRequest& request);
  // A bit for each of decode's blocks: all that the source owes it is there.
  std::string arrived(const KvLoadRequest& request) const;
};

}  // namespace baton::kvtransfer
