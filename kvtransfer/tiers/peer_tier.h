// Records in another process, as the tiers below a cache see it.
//
// What is there has to be asked for: find() of a store waits for no answer, it says "pending", and
// `changed` is called when to ask again. A process that does not answer has nothing: the tier is
// silent until it does. kvtransfer/store/ has the one over Baton's transport.
//
// Threads: lookup(), contains() and wants() for the engine's, put() for the one that saves, pin()
// and read() for the one that loads; the rest for any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "kvtransfer/tiers/tier_record.h"
#include "transport/clock.h"

namespace baton::kvtransfer::tiers {

class PeerTier {
 public:
  virtual ~PeerTier() = default;

  // True: contains() knows about these keys, or the other process has nothing to say. False: it has
  // been asked; `changed` is called when the answer is here, or overdue. Never blocks.
  virtual bool lookup(std::span<const TierKey> keys) = 0;
  // It is there, and will be for at least as long as a load may take.
  virtual bool contains(const TierKey& key) = 0;

  // Whether put() makes sense: the other process answers, and is not known to have it.
  virtual bool wants(const TierKey& key) = 0;
  // Offers a sealed record, which the other process copies if it lacks it. Waits a moment for room
  // to put it; false: there is none, or no store answers.
  virtual bool put(const TierRecord& record) = 0;

  // Blocks until what was offered is there, or will not be.
  virtual void flush() = 0;

  struct Pin {
    uint32_t page = 0;  // where it begins there
    RecordHeader header;
  };
  // Nothing: a miss.
  virtual std::optional<Pin> pin(const TierKey& key) = 0;
  // Reads one part of each. `done` is called once for each, with bytes that are checked, or none.
  // Blocks, at most for about `timeout`.
  using Done = std::function<void(size_t number, std::span<const std::byte> bytes)>;
  virtual void read(std::span<Pin* const> pins, uint32_t part, Time timeout, const Done& done) = 0;

  virtual uint64_t corrupt() const = 0;   // records that were not what was written
  virtual uint64_t silences() const = 0;  // times that the other process did not answer in time
  virtual std::string explain() const = 0;
};

// Makes the tier of a store with records of this shape. `changed` may be called from any thread
// until the tier is gone.
using PeerTierFactory = std::function<absl::StatusOr<std::unique_ptr<PeerTier>>(
    const TierShape& shape, std::function<void()> changed)>;

}  // namespace baton::kvtransfer::tiers
