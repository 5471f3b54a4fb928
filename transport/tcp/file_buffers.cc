// Buffers for incoming bytes, in a memfd.
#include "transport/tcp/file_buffers.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace baton::tcp {

absl::StatusOr<std::unique_ptr<FileBuffers>> FileBuffers::create(size_t bytes) {
  base::UniqueFd file(memfd_create("baton-tcp", MFD_CLOEXEC));
  if (!file.valid()) {
    return absl::UnavailableError(absl::StrCat("memfd_create: ", strerror(errno),
                                               "; raise the limit on open files (ulimit -n)"));
  }
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return std::unique_ptr<FileBuffers>(
      new FileBuffers(std::move(file), (bytes + page - 1) / page * page));
}

// That there is a part of the file that nobody uses.
bool FileBuffers::make_part() {
  if (!free_.empty()) return true;
  const auto bytes = static_cast<off_t>(bytes_);
  if (ftruncate(file_.get(), end_ + bytes) != 0) return false;
  free_.push_back(end_);
  end_ += bytes;
  return true;
}

FileBuffers::Buffer FileBuffers::take() {
  if (!make_part()) return {};
  const off_t at = free_.back();
  void* const data = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file_.get(), at);
  if (data == MAP_FAILED) return {};
  free_.pop_back();
  return {static_cast<char*>(data), at};
}

void FileBuffers::give_back(const Buffer& buffer) {
  munmap(buffer.data, bytes_);
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
  ssize_t moved;
  do {
    moved = preadv(file_.get(), pieces, static_cast<int>(count), buffer.at + (from - buffer.data));
  } while (moved < 0 && errno == EINTR);
  return moved < 0 ? 0 : static_cast<size_t>(moved);
}

bool FileBuffers::copy_in(const Buffer& buffer, char* to, const void* data, size_t bytes) const {
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
  if (!make_part()) return true;
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
