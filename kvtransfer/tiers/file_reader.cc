// The threads of a file's reads.
#include "kvtransfer/tiers/file_reader.h"

#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "kvtransfer/tiers/tier_record.h"

namespace baton::kvtransfer::tiers {

FileReader::FileReader(int fd, size_t largest_read) : fd_(fd) {
  const size_t bytes = (largest_read + kPage - 1) / kPage * kPage;
  for (size_t i = 0; i < kThreads; ++i) {
    AlignedBytes buffer = aligned_bytes(bytes);
    if (buffer == nullptr) break;
    try {
      threads_.emplace_back([this, memory = std::move(buffer)] { work(memory.get()); });
    } catch (const std::system_error&) {
      break;
    }
  }
}

FileReader::~FileReader() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void FileReader::read(std::span<const FileRead> reads, const Done& done) {
  std::unique_lock lock(mutex_);
  reads_ = reads;
  done_ = &done;
  next_ = ended_ = 0;
  work_.notify_all();
  all_ended_.wait(lock, [this] { return ended_ == reads_.size(); });
  reads_ = {};
}

void FileReader::work(std::byte* memory) {
  std::unique_lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [this] { return stop_ || next_ < reads_.size(); });
    if (stop_) return;
    const size_t number = next_++;
    const FileRead read = reads_[number];
    const Done& done = *done_;
    lock.unlock();
    done(number, {memory, read_whole(read, memory) ? read.bytes : 0});
    lock.lock();
    if (++ended_ == reads_.size()) all_ended_.notify_all();
  }
}

bool FileReader::read_whole(const FileRead& read, std::byte* memory) const {
  ssize_t count = 0;
  do {
    count = pread(fd_, memory, read.bytes, static_cast<off_t>(read.offset));
  } while (count < 0 && errno == EINTR);
  return count >= 0 && static_cast<size_t>(count) == read.bytes;
}

}  // namespace baton::kvtransfer::tiers
