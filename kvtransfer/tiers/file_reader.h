// Many reads of one file at a time, by threads that call pread().
//
// Buffers are the reader's own, aligned for O_DIRECT: what was read is given to the caller, who
// checks it and copies what he wants.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

namespace baton::kvtransfer::tiers {

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

}  // namespace baton::kvtransfer::tiers
