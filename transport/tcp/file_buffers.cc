// Buffers for incoming bytes, in a memfd.
#include "transport/tcp/file_buffers.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace baton::tcp {

absl::StatusOr<std::unique_ptr<FileBuffers>> FileBuffers::create(size_t bytes) {
  UniqueFd file(memfd_create("baton-tcp", MFD_CLOEXEC));
  if (!file.valid()) {
    return absl::UnavailableError(absl::StrCat("memfd_create: ", strerror(errno),
                                               "; raise the limit on open files (ulimit -n)"));
  }
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return std::unique_ptr<FileBuffers>(
      new FileBuffers(std::move(file), (bytes + page - 1) / page * page));
}

FileBuffers::Buffer FileBuffers::take() {
  const auto bytes = static_cast<off_t>(bytes_);
  if (free_.empty()) {
    if (ftruncate(file_.get(), end_ + bytes) != 0) throw std::bad_alloc();
    free_.push_back(end_);
    end_ += bytes;
  }
  const off_t at = free_.back();
  void* const data = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file_.get(), at);
  if (data == MAP_FAILED) throw std::bad_alloc();
  free_.pop_back();
  return {static_cast<char*>(data), at};
}

void FileBuffers::give_back(const Buffer& buffer) {
  munmap(buffer.data, bytes_);
  fallocate(file_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, buffer.at,
            static_cast<off_t>(bytes_));
  free_.push_back(buffer.at);
}

size_t FileBuffers::copy_out(const Buffer& buffer, const char* from, const iovec* pieces,
                             size_t count) const {
  ssize_t moved;
  do {
    moved = preadv(file_.get(), pieces, static_cast<int>(count), buffer.at + (from - buffer.data));
  } while (moved < 0 && errno == EINTR);
  return moved < 0 ? 0 : static_cast<size_t>(moved);
}

bool FileBuffers::copy_in(const Buffer& buffer, char* to, const void* data, size_t bytes) const {
  size_t done = 0;
  while (done < bytes) {
    const ssize_t moved = pwrite(file_.get(), static_cast<const char*>(data) + done, bytes - done,
                                 buffer.at + (to - buffer.data) + static_cast<off_t>(done));
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) return false;
    done += static_cast<size_t>(moved);
  }
  return true;
}

bool FileBuffers::readable(const iovec& memory) {
  const Buffer scratch = take();
  bool good = true;
  for (size_t done = 0; good && done < memory.iov_len; done += bytes_) {
    good = copy_in(scratch, scratch.data, static_cast<char*>(memory.iov_base) + done,
                   std::min(memory.iov_len - done, bytes_));
  }
  give_back(scratch);
  return good;
}

}  // namespace baton::tcp
