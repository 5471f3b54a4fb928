// Decorators: wrappers around any provider. `shaped` gives a link a chosen bandwidth and latency,
// `traced` writes every slice to a timeline. They change when bytes move, never which.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "transport/provider.h"
#include "transport/timeline.h"

namespace baton {

// The link that a shaped provider pretends to be. All rails of the provider share it; each
// direction that this worker initiates (writes out, reads in) is limited.
struct LinkShape {
  double bytes_per_second = 0;  // 0: unlimited
  Time latency{};               // one way, added to every slice
  // "40MB/s", "10Gb/s", "40MB/s,200us", "5ms". B is bytes, b is bits, prefixes are powers of 1000.
  static absl::StatusOr<LinkShape> parse(std::string_view text);
  std::string to_string() const;  // for people: "40 MB/s, 200 us"
};

// A slice reaches the inner provider at the moment its last byte would have left the link, plus the
// latency, so the target sees it arrive no earlier than that. Slices wait for the link in the order
// they were posted, except that transfers of at most 64 KiB pass larger ones, as they do in the
// worker's own queues; a slice on the link is not interrupted.
//
// Slices are cut to about 1 ms of link time (the worker cuts larger where a transfer would have too
// many). Where the inner provider takes only whole transfers (its slice_bytes is SIZE_MAX, as with
// shm), the whole transfer is copied when its last byte would have come: right in its end and its
// counter, but not spread over the time before.
//
// Cancelled slices that the link has not delivered end at once, and give their link time back.
std::unique_ptr<Provider> shaped(std::unique_ptr<Provider> inner, LinkShape shape,
                                 const Clock& clock);

// A span per slice on track "tx" (writes) or "rx" (reads), from post to slice_done. Its name is
// "write" or "read", its request identifies the transfer. Slices that do not end well are named
// "write failed", "read cancelled".
std::unique_ptr<Provider> traced(std::unique_ptr<Provider> inner, Timeline& timeline,
                                 const Clock& clock);

}  // namespace baton
