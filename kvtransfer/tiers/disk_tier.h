// Records in one file of slots, past the page cache where the file system allows it.
//
// The file is as large as it will ever be when it has been opened, so a disk that fills up later
// takes nothing away. A record is written with its header, in one call, over a slot that no reader
// can find meanwhile; after a crash a slot holds a whole record, or one whose sums are wrong, which
// is a miss. Opening reads all headers: what an earlier process wrote is found again.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvtransfer/tiers/tier_record.h"
#include "transport/base/unique_fd.h"

namespace baton::kvtransfer::tiers {

// Many reads of one file at a time, by threads that call pread().
//
// Buffers are the reader's own, aligned for O_DIRECT: what was read is given to the caller, who
// checks it and copies what he wants.

struct FileRead {
  uint64_t offset = 0;  // a multiple of the file system's block
  size_t bytes = 0;     // likewise; at most what the reader was made for
};

class FileReader {
 public:
  static constexpr size_t kThreads = 16;  // reads at a time

  // `fd` must outlive the reader. As many threads as can be had; valid(): there is one.
  FileReader(int fd, size_t largest_read);
  ~FileReader();
  FileReader(const FileReader&) = delete;
  FileReader& operator=(const FileReader&) = delete;
  bool valid() const { return !threads_.empty(); }

  // Called once for each read, with its number and its bytes; none where the read failed or came
  // out short. By several threads at once, in any order. The bytes are the reader's again
  // afterwards.
  using Done = std::function<void(size_t number, std::span<const std::byte> bytes)>;
  // Blocks until all have ended. One call at a time.
  void read(std::span<const FileRead> reads, const Done& done);

 private:
  void work(std::byte* memory);
  bool read_whole(const FileRead& read, std::byte* memory) const;

  const int fd_;
  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable all_ended_;
  bool stop_ = false;
  std::span<const FileRead> reads_;
  const Done* done_ = nullptr;
  size_t next_ = 0;
  size_t ended_ = 0;
  std::vector<std::thread> threads_;
};

struct DiskTierOptions {
  std::string directory;  // made if it is not there; the tier's file in it is the process's own
  size_t bytes = 0;       // at most, for the file
  TierShape shape;
};

// One thread writes, one reads; contains() and the counters are for any.
class DiskTier {
 public:
  ~DiskTier();
  // Unavailable: another process has the file. ResourceExhausted: less space than that, or than one
  // record. Others: what the system said, and of which file.
  static absl::StatusOr<std::unique_ptr<DiskTier>> open(const DiskTierOptions& options);

  bool contains(const TierKey& key) const;

  // Writes a sealed record, over the one that was used longest ago if there is no other room. Where
  // the disk fails the tier is off from then on, and this says why, once; OK afterwards.
  absl::Status put(const TierRecord& record);

  // Keeps a record where it is, until unpin(), and makes it the last to leave. Nothing: a miss.
  struct Pin {
    uint32_t slot = 0;
    RecordHeader header;
  };
  std::optional<Pin> pin(const TierKey& key);
  void unpin(const Pin& pin);
  // Reads one part of each. `done` is called as FileReader::Done is, with bytes that are checked,
  // or none: then the record has left the tier. Blocks.
  using Done = std::function<void(size_t number, std::span<const std::byte> bytes)>;
  void read(std::span<Pin* const> pins, uint32_t part, const Done& done);

  // The sequence of the newest record, found on opening or written since.
  uint64_t last_sequence() const;
  size_t records() const;
  uint64_t evicted() const;
  uint64_t corrupt() const;
  // How it reads and writes, for people.
  std::string explain() const;

 private:
  explicit DiskTier(const DiskTierOptions& options) : options_(options) {}
  absl::Status open_file();
  absl::Status scan();
  struct Slot {
    std::optional<TierKey> key;
    uint64_t sequence = 0;
    uint32_t pins = 0;
    std::list<uint32_t>::iterator place;  // in order_
  };
  uint64_t offset(uint32_t slot) const { return slot * options_.shape.record_bytes(); }
  std::optional<uint32_t> take_slot(const TierKey& key);
  void forget(uint32_t slot);

  const DiskTierOptions options_;
  base::UniqueFd file_;
  bool direct_ = false;
  std::unique_ptr<FileReader> reader_;
  mutable std::mutex mutex_;
  std::vector<Slot> slots_;
  std::list<uint32_t> order_;  // all slots; the front is written over first
  absl::flat_hash_map<TierKey, uint32_t> index_;
  uint64_t sequence_ = 0;
  uint64_t evicted_ = 0;
  uint64_t corrupt_ = 0;
  bool off_ = false;
};

}  // namespace baton::kvtransfer::tiers
