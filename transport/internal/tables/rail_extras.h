// Optional interfaces of a rail: PromptRail posts from within submit(); CountingRail reports slices
// to the target only by counting them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "transport/provider.h"

namespace baton::internal {

// A rail on which a small slice is with the adapter when post() returns, if nothing else waits or
// is under way there: then submit() may call post() itself.
class PromptRail {
 public:
  static constexpr size_t kMost = 1024;  // bytes of such a slice
  virtual bool prompt() const = 0;

  // The same in one step, for a transfer of one run at both ends, of memory of the host, that tells
  // its target nothing or raises a counter by one. True: it is with the adapter, as slice 0 of
  // `transfer`, of which nothing is read before the worker, whose lock is held, has filled it in.
  // False: nothing has happened, and post() may still take it.
  virtual bool post_promptly(const TransferRequest& request,
                             const TransferDescriptor& transfer) = 0;

 protected:
  ~PromptRail() = default;
};

// A message of a rail by its number, counted from 0 in each epoch of the rail. An immediate has no
// other name: the target cannot say of its transfer whether it has arrived, but how many have.
struct Ordinal {
  uint32_t epoch = 0;
  uint32_t number = 0;
};

class CountingRail {
 public:
  // As the target: the epoch, and how many messages of it have arrived. What comes after the rail
  // was closed does not count. None: this rail does not count.
  virtual std::optional<Ordinal> counted() const = 0;

 protected:
  ~CountingRail() = default;
};

// The kUnknown of slice_done() for a slice that the target only counts carries its number.
void set_ordinal(absl::Status& status, Ordinal ordinal);
std::optional<Ordinal> ordinal_of(const absl::Status& status);

}  // namespace baton::internal
