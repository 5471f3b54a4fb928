// The counter table: generation and value in one word, in memory that peers can map.
#include "transport/counter.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "transport/base/limits/refusals.h"
#include "transport/base/wire.h"

namespace baton {
namespace {
constexpr int kValueBits = 48;
constexpr uint64_t kValueMask = CounterTable::kMaxValue;
constexpr uint64_t generation_of(uint64_t word) { return word >> kValueBits; }
}  // namespace

std::string RemoteCounter::encode() const {
  std::string out(reinterpret_cast<const char*>(owner.bytes.data()), owner.bytes.size());
  base::put_number(out, index);
  base::put_number(out, static_cast<uint32_t>(generation));
  return out;
}

absl::StatusOr<RemoteCounter> RemoteCounter::decode(std::string_view bytes) {
  base::WireReader in(bytes);
  RemoteCounter counter;
  const std::string_view owner = in.take(counter.owner.bytes.size());
  if (!owner.empty()) std::memcpy(counter.owner.bytes.data(), owner.data(), owner.size());
  counter.index = in.number<uint32_t>();
  const uint32_t generation = in.number<uint32_t>();
  if (!in.finished() || generation == 0 || generation > UINT16_MAX ||
      counter.index >= CounterTable::kCapacity) {
    return absl::InvalidArgumentError(
        "not a RemoteCounter: pass on the bytes of RemoteCounter::encode() unchanged");
  }
  counter.generation = static_cast<uint16_t>(generation);
  return counter;
}

absl::StatusOr<CounterTable> CounterTable::create(WorkerUid owner) {
  CounterTable table;
  table.owner_ = owner;
  void* map = MAP_FAILED;
  if (auto file = base::make_memory_file("baton-counters", kBytes); file.ok()) {
    table.fd_ = file->release();
    map = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, table.fd_, 0);
  }
  if (map == MAP_FAILED) {
    if (table.fd_ >= 0) close(std::exchange(table.fd_, -1));
    map = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  }
  if (map == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("no memory for %u counters: %s", kCapacity, strerror(errno)));
  }
  table.words_ = static_cast<Word*>(map);
  return table;
}

CounterTable::CounterTable(CounterTable&& other) noexcept
    : owner_(other.owner_),
      words_(std::exchange(other.words_, nullptr)),
      fd_(std::exchange(other.fd_, -1)),
      used_(other.used_),
      freed_(std::move(other.freed_)),
      first_freed_(other.first_freed_),
      freed_count_(other.freed_count_) {}

CounterTable::~CounterTable() {
  if (words_ != nullptr) munmap(words_, kBytes);
  if (fd_ >= 0) close(fd_);
}

absl::StatusOr<CounterId> CounterTable::allocate() {
  uint32_t index = used_;
  if (freed_count_ > kRest || (used_ == kCapacity && freed_count_ > 0)) {
    index = freed_[first_freed_];
    first_freed_ = (first_freed_ + 1) % freed_.size();
    --freed_count_;
  } else if (used_ < kCapacity) {
    ++used_;
  } else {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "all %u counters are in use: free those of requests that have ended", kCapacity));
  }
  // Generation 0 means "none". A freed word already has a generation that no handle holds.
  uint64_t generation = (generation_of(words_[index].load(std::memory_order_relaxed)) + 1) & 0xffff;
  if (generation == 0) generation = 1;
  words_[index].store(generation << kValueBits, std::memory_order_release);
  return CounterId{index, static_cast<uint16_t>(generation)};
}

absl::Status CounterTable::free(CounterId id) {
  if (id.index >= kCapacity || id.generation == 0 ||
      generation_of(words_[id.index].load(std::memory_order_relaxed)) != id.generation) {
    return absl::NotFoundError("this counter has been freed already");
  }
  const uint64_t next = (id.generation + uint64_t{1}) & 0xffff;
  words_[id.index].store(next << kValueBits, std::memory_order_release);
  if (freed_count_ == freed_.size()) {
    std::rotate(freed_.begin(), freed_.begin() + static_cast<ptrdiff_t>(first_freed_),
                freed_.end());
    first_freed_ = 0;
    freed_.resize(std::max<size_t>(64, 2 * freed_.size()));
  }
  freed_[(first_freed_ + freed_count_++) % freed_.size()] = id.index;
  return absl::OkStatus();
}

uint64_t CounterTable::value(CounterId id) const {
  if (id.index >= kCapacity || id.generation == 0) return 0;
  const uint64_t word = words_[id.index].load(std::memory_order_acquire);
  return generation_of(word) == id.generation ? word & kValueMask : 0;
}

bool CounterTable::add(Word* words, uint32_t index, uint16_t generation, uint64_t amount) {
  if (index >= kCapacity || generation == 0) return false;
  uint64_t word = words[index].load(std::memory_order_relaxed);
  uint64_t next = 0;
  do {
    if (generation_of(word) != generation) return false;
    next = (word & ~kValueMask) | ((word + amount) & kValueMask);
  } while (!words[index].compare_exchange_weak(word, next, std::memory_order_release,
                                               std::memory_order_relaxed));
  return true;
}

}  // namespace baton
