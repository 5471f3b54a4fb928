// Reads through io_uring, by its system calls: the kernel's header is all that it takes.
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvtransfer/tiers/file_reader.h"
#include "kvtransfer/tiers/tier_record.h"
#include "transport/base/unique_fd.h"

namespace baton::kvtransfer::tiers {
namespace {

// A mapping of the ring's, gone with this object.
class Mapping {
 public:
  Mapping() = default;
  Mapping(int fd, size_t bytes, uint64_t offset)
      : bytes_(bytes),
        address_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd,
                      static_cast<off_t>(offset))) {}
  Mapping(Mapping&& other) noexcept
      : bytes_(other.bytes_), address_(std::exchange(other.address_, MAP_FAILED)) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(bytes_, other.bytes_);
    std::swap(address_, other.address_);
    return *this;
  }
  ~Mapping() {
    if (valid()) munmap(address_, bytes_);
  }
  bool valid() const { return address_ != MAP_FAILED; }
  template <typename T>
  T* at(uint32_t offset) const {
    return reinterpret_cast<T*>(static_cast<std::byte*>(address_) + offset);
  }

 private:
  size_t bytes_ = 0;
  void* address_ = MAP_FAILED;
};

class RingReader : public FileReader {
 public:
  // Why not, or nothing.
  std::string open(int fd, size_t largest_read);
  void read(std::span<const FileRead> reads, const Done& done) override;
  std::string name() const override { return "io_uring"; }

 private:
  std::byte* buffer(uint32_t slot) const { return memory_.get() + slot * stride_; }
  void prepare(const FileRead& read, size_t number, uint32_t slot);
  // Reads that are prepared begin; waits until so many have ended. Returns how many began.
  uint32_t enter(uint32_t prepared, uint32_t wait_for);
  // Takes one that has ended, if there is one.
  bool reap(std::span<const FileRead> reads, const Done& done);

  base::UniqueFd ring_;
  Mapping rings_, entries_;
  io_uring_params params_{};
  size_t stride_ = 0;
  AlignedBytes memory_;
  std::vector<uint32_t> free_;   // slots
  std::vector<size_t> numbers_;  // of the read in each slot
};

std::string RingReader::open(int fd, size_t largest_read) {
  // Where the kernel knows how, an end waits for the next call, and interrupts nothing.
  params_.flags = IORING_SETUP_COOP_TASKRUN;
  ring_.reset(static_cast<int>(syscall(SYS_io_uring_setup, kReadDepth, &params_)));
  if (!ring_.valid() && errno == EINVAL) {
    params_ = {};
    ring_.reset(static_cast<int>(syscall(SYS_io_uring_setup, kReadDepth, &params_)));
  }
  if (!ring_.valid()) return absl::StrCat("io_uring_setup: ", std::strerror(errno));
  if ((params_.features & IORING_FEAT_SINGLE_MMAP) == 0) return "this kernel's io_uring is too old";
  const size_t ring_bytes =
      std::max<size_t>(params_.sq_off.array + params_.sq_entries * sizeof(uint32_t),
                       params_.cq_off.cqes + params_.cq_entries * sizeof(io_uring_cqe));
  rings_ = Mapping(ring_.get(), ring_bytes, IORING_OFF_SQ_RING);
  entries_ = Mapping(ring_.get(), params_.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES);
  if (!rings_.valid() || !entries_.valid()) return "the rings could not be mapped";
  stride_ = (largest_read + kPage - 1) / kPage * kPage;
  // In huge pages, where there are any: a read of a few pieces costs the kernel and the disk less
  // than one of as many pieces as there are small pages in it.
  constexpr size_t kHuge = size_t{2} << 20;
  const size_t memory = (stride_ * kReadDepth + kHuge - 1) / kHuge * kHuge;
  memory_.reset(static_cast<std::byte*>(std::aligned_alloc(kHuge, memory)));
  if (memory_ == nullptr) return "no memory for buffers";
  madvise(memory_.get(), memory, MADV_HUGEPAGE);  // a hint
  std::memset(memory_.get(), 0, memory);
  std::vector<iovec> buffers(kReadDepth);
  for (uint32_t slot = 0; slot < kReadDepth; ++slot) {
    buffers[slot] = {buffer(slot), stride_};
    free_.push_back(slot);
  }
  numbers_.resize(kReadDepth);
  if (syscall(SYS_io_uring_register, ring_.get(), IORING_REGISTER_BUFFERS, buffers.data(),
              kReadDepth) < 0) {
    return absl::StrCat("registering buffers: ", std::strerror(errno), " (see ulimit -l)");
  }
  if (syscall(SYS_io_uring_register, ring_.get(), IORING_REGISTER_FILES, &fd, 1) < 0) {
    return absl::StrCat("registering the file: ", std::strerror(errno));
  }
  return "";
}

void RingReader::prepare(const FileRead& read, size_t number, uint32_t slot) {
  const uint32_t tail = *rings_.at<uint32_t>(params_.sq_off.tail);
  const uint32_t index = tail & *rings_.at<uint32_t>(params_.sq_off.ring_mask);
  io_uring_sqe& entry = entries_.at<io_uring_sqe>(0)[index];
  entry = {};
  entry.opcode = IORING_OP_READ_FIXED;
  entry.flags = IOSQE_FIXED_FILE;
  entry.fd = 0;
  entry.off = read.offset;
  entry.addr = reinterpret_cast<uint64_t>(buffer(slot));
  entry.len = static_cast<uint32_t>(read.bytes);
  entry.buf_index = static_cast<uint16_t>(slot);
  entry.user_data = slot;
  numbers_[slot] = number;
  rings_.at<uint32_t>(params_.sq_off.array)[index] = index;
  std::atomic_ref(*rings_.at<uint32_t>(params_.sq_off.tail))
      .store(tail + 1, std::memory_order_release);
}

uint32_t RingReader::enter(uint32_t prepared, uint32_t wait_for) {
  const auto begun =
      syscall(SYS_io_uring_enter, ring_.get(), prepared, wait_for,
              wait_for > 0 ? unsigned{IORING_ENTER_GETEVENTS} : 0u, nullptr, size_t{0});
  return begun > 0 ? static_cast<uint32_t>(begun) : 0;
}

bool RingReader::reap(std::span<const FileRead> reads, const Done& done) {
  auto* head = rings_.at<uint32_t>(params_.cq_off.head);
  const uint32_t mask = *rings_.at<uint32_t>(params_.cq_off.ring_mask);
  const uint32_t tail =
      std::atomic_ref(*rings_.at<uint32_t>(params_.cq_off.tail)).load(std::memory_order_acquire);
  if (*head == tail) return false;
  const io_uring_cqe& entry = rings_.at<io_uring_cqe>(params_.cq_off.cqes)[*head & mask];
  const auto slot = static_cast<uint32_t>(entry.user_data);
  const size_t number = numbers_[slot];
  const bool whole = entry.res >= 0 && static_cast<size_t>(entry.res) == reads[number].bytes;
  std::atomic_ref(*head).store(*head + 1, std::memory_order_release);
  done(number, {buffer(slot), whole ? reads[number].bytes : 0});
  free_.push_back(slot);
  return true;
}

// What has ended is checked by who called, which takes a while: meanwhile its slots read on, a few
// at a time, so that the disk has always something to do.
void RingReader::read(std::span<const FileRead> reads, const Done& done) {
  constexpr uint32_t kFew = 4;
  size_t next = 0;
  size_t ended = 0;
  uint32_t prepared = 0;
  while (ended < reads.size()) {
    for (; next < reads.size() && !free_.empty(); ++next, ++prepared) {
      const uint32_t slot = free_.back();
      free_.pop_back();
      prepare(reads[next], next, slot);
    }
    if (reap(reads, done)) {
      ++ended;
      if (prepared >= kFew) prepared -= enter(prepared, 0);
    } else {
      prepared -= enter(prepared, 1);
    }
  }
}

}  // namespace

std::unique_ptr<FileReader> make_ring_reader(int fd, size_t largest_read, std::string* why) {
  auto reader = std::make_unique<RingReader>();
  *why = reader->open(fd, largest_read);
  if (!why->empty()) return nullptr;
  return reader;
}

}  // namespace baton::kvtransfer::tiers
