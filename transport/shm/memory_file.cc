// Memory files: sealed memfds of our own, and mappings of those that a peer sent us.
#include "transport/shm/memory_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_format.h"
#include "transport/base/limits/refusals.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace baton::shm {

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      populated_(std::exchange(other.populated_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(populated_, other.populated_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(data_, size_);
}

absl::StatusOr<MappedFile> MappedFile::map(int fd, size_t bytes, Protection protection,
                                           const char* what) {
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0) {
    return absl::InvalidArgumentError(absl::StrFormat("the peer's %s is not a memfd", what));
  }
  if ((seals & F_SEAL_SHRINK) == 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the peer's %s is not sealed against shrinking (F_SEAL_SHRINK)", what));
  }
  struct stat file {};
  if (fstat(fd, &file) != 0 || bytes == 0 || static_cast<size_t>(file.st_size) < bytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the peer's %s has %d bytes, but it announced %u", what,
                        static_cast<int64_t>(file.st_size), bytes));
  }
  const bool write = protection == Protection::kReadWrite;
  void* at = mmap(nullptr, file.st_size, PROT_READ | (write ? PROT_WRITE : 0), MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("mapping %d bytes of the peer's %s failed: %s; raise `ulimit -v` or "
                        "vm.max_map_count",
                        static_cast<int64_t>(file.st_size), what, strerror(errno)));
  }
  MappedFile mapped;
  mapped.data_ = static_cast<std::byte*>(at);
  mapped.size_ = file.st_size;
  if (!write) mapped.populated_ = mapped.size_;
  return mapped;
}

bool MappedFile::populate(size_t bytes) {
  if (populated()) return false;
  const size_t step = std::min(bytes, size_ - populated_);
  if (madvise(data_ + populated_, step, MADV_POPULATE_WRITE) != 0) {
    populated_ = size_;  // pages will be faulted in one by one, as they are touched
    return false;
  }
  populated_ += step;
  return !populated();
}

absl::StatusOr<OwnFile> create_file(const char* name, size_t bytes) {
  auto fd = base::make_memory_file(name, bytes);
  if (!fd.ok()) return fd.status();
  auto mapping = MappedFile::map(fd->get(), bytes, MappedFile::Protection::kReadWrite, name);
  if (!mapping.ok()) return mapping.status();
  return OwnFile{*std::move(fd), *std::move(mapping)};
}

void forbid_new_writers(int fd) {
  // Before Linux 5.1 the seal does not exist, and peers are trusted to map read-only.
  fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE);
}

bool shareable(int fd) {
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0) return false;
  return (seals & F_SEAL_SHRINK) != 0 || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0;
}

}  // namespace baton::shm
