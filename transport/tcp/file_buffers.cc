// Buffers for incoming bytes, in a memfd where there may be one.
#include "transport/tcp/file_buffers.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/types/span.h"
#include "transport/base/copies/fault_guard.h"
#include "transport/base/limits/refusals.h"

namespace baton::tcp {

namespace {

size_t page() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

}  // namespace

FileBuffers::FileBuffers(size_t bytes)
    : file_(memfd_create("baton-tcp", MFD_CLOEXEC)),
      bytes_((bytes + page() - 1) / page() * page()) {}

// Makes sure that a part of the file is not in use by a reader.
bool FileBuffers::make_part() {
  if (!free_.empty()) return true;
  const auto bytes = static_cast<off_t>(bytes_);
  if (!file_.valid() || !base::file_may_have(static_cast<uint64_t>(end_ + bytes)).ok() ||
      ftruncate(file_.get(), end_ + bytes) != 0) {
    return false;
  }
  free_.push_back(end_);
  end_ += bytes;
  return true;
}

FileBuffers::Buffer FileBuffers::take() {
  constexpr int kProtection = PROT_READ | PROT_WRITE;
  const off_t at = make_part() ? free_.back() : kNoFile;
  void* const data = at != kNoFile
                         ? mmap(nullptr, bytes_, kProtection, MAP_SHARED, file_.get(), at)
                         : mmap(nullptr, bytes_, kProtection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return {};
  if (at != kNoFile) free_.pop_back();
  return {static_cast<char*>(data), at};
}

void FileBuffers::give_back(const Buffer& buffer) {
  munmap(buffer.data, bytes_);
  if (buffer.at == kNoFile) return;
  free_up(buffer.at);
  free_.push_back(buffer.at);
}

// The pages behind a part of the file.
void FileBuffers::free_up(off_t at) const {
  fallocate(file_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at,
            static_cast<off_t>(bytes_));
}

size_t FileBuffers::copy_out(const Buffer& buffer, const char* from, const iovec* pieces,
                             size_t count) const {
  if (buffer.at == kNoFile) {
    size_t done = 0;
    for (const iovec& piece : absl::MakeSpan(pieces, count)) {
      if (!base::guarded([&] { std::memcpy(piece.iov_base, from + done, piece.iov_len); })) break;
      done += piece.iov_len;
    }
    return done;
  }
  ssize_t moved;
  do {
    moved = preadv(file_.get(), pieces, static_cast<int>(count), buffer.at + (from - buffer.data));
  } while (moved < 0 && errno == EINTR);
  return moved < 0 ? 0 : static_cast<size_t>(moved);
}

bool FileBuffers::copy_in(const Buffer& buffer, char* to, const void* data, size_t bytes) const {
  if (buffer.at == kNoFile) return base::guarded([&] { std::memcpy(to, data, bytes); });
  return write(buffer.at + (to - buffer.data), data, bytes);
}

bool FileBuffers::write(off_t at, const void* data, size_t bytes) const {
  size_t done = 0;
  while (done < bytes) {
    const ssize_t moved = pwrite(file_.get(), static_cast<const char*>(data) + done, bytes - done,
                                 at + static_cast<off_t>(done));
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) return false;
    done += static_cast<size_t>(moved);
  }
  return true;
}

bool FileBuffers::readable(const iovec& memory) {
  if (!make_part()) {
    size_t done = 0;
    const auto* const data = static_cast<const std::byte*>(memory.iov_base);
    while (done < memory.iov_len &&
           base::readable(data + done, std::min(memory.iov_len - done, page())))
      done += page();
    return done >= memory.iov_len;
  }
  const off_t scratch = free_.back();  // need not be mapped for this
  bool good = true;
  for (size_t done = 0; good && done < memory.iov_len; done += bytes_) {
    good = write(scratch, static_cast<char*>(memory.iov_base) + done,
                 std::min(memory.iov_len - done, bytes_));
  }
  free_up(scratch);
  return good;
}

}  // namespace baton::tcp
