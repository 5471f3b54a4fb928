// Copies lists of pieces on a stream, each list the way that is cheapest for it (planner.h).
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "gpudirect/copies/planner.h"
#include "gpudirect/device.h"
#include "gpudirect/device_memory.h"
#include "gpudirect/launcher.h"
#include "gpudirect/registered_pages.h"

namespace baton::gpudirect {

// Times of copies of equal pieces, by the number of pieces, in nanoseconds.
using CopyTimes = std::array<double, CopyTable::kCounts.size()>;

// For one thread at a time. Device, launcher and stream outlive it; when it ends, nothing that it
// queued may still be running.
class Copier {
 public:
  // Takes 4 MiB of the device and half a MiB of registered host memory where there are kernels.
  // `launcher` may be null: then everything is copied without kernels. Without `packs` none packs,
  // and nothing of the device is taken: for copies within one. The stream is one of the device's,
  // never the legacy one; what is queued there runs in order.
  static absl::StatusOr<std::unique_ptr<Copier>> open(const Device& device,
                                                      const Launcher* launcher, Stream stream,
                                                      bool packs = true);
  ~Copier();
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  // Queues the copies of a list, by the cheapest way that can be taken now, and returns: neither
  // the call nor the list is needed when it has returned. No copy may write what another reads. If
  // two write the same byte (layouts allow that), either value may win. To and from the host no
  // single copy is larger than 4 MiB: the copy engine serves in order, and urgent copies wait for
  // what is before them. After an error part of the list may still be copied. Pass `kernels` =
  // false if this device's kernels do not reach all of the memory.
  absl::Status copy(CopyRoute route, absl::Span<const CopyPiece> pieces, bool kernels = true);
  // The same by a given way; FailedPrecondition where the list or the device has no such way.
  absl::Status copy_by(CopyWay way, CopyRoute route, absl::Span<const CopyPiece> pieces);

  // Fills the table by trying, in about 100 ms of the device's time, of some tries the shortest;
  // blocks. Until then, and where a test sets a table, what is set.
  absl::Status measure(int tries = 5);
  void set_table(const CopyTable& table) { table_ = table; }
  const CopyTable& table() const { return table_; }

  // The way that copy() would choose for a list of this shape.
  CopyWay cheapest_way(CopyRoute route, const CopyShape& shape);
  // The ways that copy() would choose among, with their predicted costs.
  std::string explain(CopyRoute route, absl::Span<const CopyPiece> pieces);

  static constexpr size_t kMostBytes = 4 << 20;     // of one copy to or from the host
  static constexpr size_t kMostDescriptors = 1024;  // of one batch: more have crashed drivers
  static constexpr size_t kPackBytes = 4 << 20;     // packed at a time
  static constexpr size_t kListPieces = 4096;       // of one launch
  static constexpr size_t kLists = 4;               // launches whose lists are still needed

 private:
  struct List {
    kernels::Piece* pieces = nullptr;
    Event after = nullptr;  // the launch that reads it
    bool used = false;
    bool marked = false;  // else the stream itself is asked
  };

  Copier(const Device& device, const Launcher* launcher, Stream stream)
      : device_(device), launcher_(launcher), stream_(stream) {}
  absl::Status start(bool packs);
  absl::Status copy_as(std::optional<CopyWay> way, CopyRoute route,
                       absl::Span<const CopyPiece> pieces, bool kernels);
  CopyWays ways(CopyRoute route, const CopyShape& shape);
  List* free_list();
  absl::Status run(CopyWay way, CopyRoute route, absl::Span<const CopyPiece> pieces);
  absl::Status run_single(CopyRoute route, absl::Span<const CopyPiece> pieces);
  absl::Status run_rows(CopyRoute route, absl::Span<const CopyPiece> pieces);
  absl::Status run_cheapest(CopyRoute route, const CopyShape& shape,
                            absl::Span<const CopyPiece> pieces, CopyWays among);
  absl::Status run_batch(CopyRoute route, absl::Span<const CopyPiece> pieces);
  bool batch_overlaps();
  absl::Status flush_batch();
  // These two say how many pieces they have queued: fewer than all when no list is free.
  absl::StatusOr<size_t> run_packed(CopyRoute route, absl::Span<const CopyPiece> pieces);
  absl::StatusOr<size_t> run_kernel(absl::Span<const CopyPiece> pieces);
  absl::Status launch(List& list, size_t count, size_t largest);
  absl::Status wait();
  absl::StatusOr<double> time(CopyWay way, CopyRoute route, absl::Span<const CopyPiece> pieces);
  absl::Status try_counts(CopyWay way, CopyRoute route, absl::Span<const CopyPiece> pieces,
                          CopyTimes& times);

  const Device& device_;
  const Launcher* const launcher_;
  const Stream stream_;
  CopyTable table_;
  std::unique_ptr<DeviceSlab> packing_;
  std::unique_ptr<RegisteredPages> list_memory_;
  std::array<List, kLists> lists_;
  Event waited_ = nullptr;
  std::vector<CopyPiece> merged_;
  std::vector<DevicePointer> batch_to_, batch_from_;
  std::vector<size_t> batch_bytes_;
  std::vector<std::pair<DevicePointer, size_t>> written_;  // [first, first + second)
};

}  // namespace baton::gpudirect
