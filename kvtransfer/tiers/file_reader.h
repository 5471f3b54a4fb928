// Many reads of one file at a time: by io_uring with a registered file and registered buffers, or,
// where the kernel or a container refuses that, by threads that call pread().
//
// Buffers are the reader's own, aligned for O_DIRECT: what was read is given to the caller, who
// checks it and copies what he wants.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

namespace baton::kvtransfer::tiers {

struct FileRead {
  uint64_t offset = 0;  // a multiple of the file system's block
  size_t bytes = 0;     // likewise; at most what the reader was made for
};

class FileReader {
 public:
  virtual ~FileReader() = default;
  // Called once for each read, with its number and its bytes; none where the read failed or came
  // out short. Maybe by several threads at once, in any order. The bytes are the reader's again
  // afterwards.
  using Done = std::function<void(size_t number, std::span<const std::byte> bytes)>;
  // Blocks until all have ended. One call at a time.
  virtual void read(std::span<const FileRead> reads, const Done& done) = 0;
  // "io_uring" or "pread", for people.
  virtual std::string name() const = 0;
};

inline constexpr uint32_t kReadDepth = 32;  // reads at a time

// `fd` must outlive the reader. Null: io_uring is not to be had here, and `why` says why.
std::unique_ptr<FileReader> make_ring_reader(int fd, size_t largest_read, std::string* why);
// Null: no memory or no threads.
std::unique_ptr<FileReader> make_thread_reader(int fd, size_t largest_read);

}  // namespace baton::kvtransfer::tiers
