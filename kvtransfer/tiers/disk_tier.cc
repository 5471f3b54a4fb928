// The file of slots: opening, writing, reading, and what is left out when a slot is not whole.
#include "kvtransfer/tiers/disk_tier.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvtransfer/tiers/tier_record.h"
#include "transport/base/limits/refusals.h"

namespace baton::kvtransfer::tiers {
namespace {

// A process that has just been killed may have the file for a moment longer.
bool lock(int file) {
  for (int attempt = 0; flock(file, LOCK_EX | LOCK_NB) != 0; ++attempt) {
    if (attempt == 100) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return true;
}

absl::Status failed(int error, const std::string& what) {
  const std::string text = absl::StrCat(what, ": ", std::strerror(error));
  if (error == ENOSPC || error == EDQUOT || error == EFBIG) {
    return absl::ResourceExhaustedError(text);
  }
  return absl::InternalError(text);
}

}  // namespace

absl::StatusOr<std::unique_ptr<DiskTier>> DiskTier::open(const DiskTierOptions& options) {
  if (!options.shape.valid() || options.bytes < options.shape.record_bytes()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("a KV tier in ", options.directory, " of ", options.bytes,
                     " bytes has no room for one record: give it more"));
  }
  std::unique_ptr<DiskTier> tier(new DiskTier(options));
  if (absl::Status status = tier->open_file(); !status.ok()) return status;
  if (absl::Status status = tier->scan(); !status.ok()) return status;
  return tier;
}

DiskTier::~DiskTier() = default;

absl::Status DiskTier::open_file() {
  std::error_code error;
  std::filesystem::create_directories(options_.directory, error);
  const std::string path = absl::StrCat(options_.directory, "/kv-", options_.shape.parts, "x",
                                        options_.shape.part_bytes, ".tier");
  const int flags = O_RDWR | O_CREAT | O_CLOEXEC;
  file_.reset(::open(path.c_str(), flags | O_DIRECT, 0600));
  direct_ = file_.valid();
  if (!direct_) file_.reset(::open(path.c_str(), flags, 0600));
  if (!file_.valid()) return failed(error ? error.value() : errno, path);
  if (!lock(file_.get())) {
    return absl::UnavailableError(absl::StrCat(
        path, " belongs to another process: give each its own directory for KV tiers"));
  }
  const size_t record = options_.shape.record_bytes();
  const size_t count = std::min<size_t>(options_.bytes / record, UINT32_MAX - 1);
  const auto bytes = static_cast<off_t>(count * record);
  if (absl::Status may = base::file_may_have(count * record); !may.ok()) {
    return absl::ResourceExhaustedError(absl::StrCat(path, ": ", may.message()));
  }
  int no_space = posix_fallocate(file_.get(), 0, bytes);
  if (no_space == EOPNOTSUPP || no_space == EINVAL) {
    no_space = ftruncate(file_.get(), bytes) == 0 ? 0 : errno;
  }
  if (no_space != 0) return failed(no_space, path);
  if (ftruncate(file_.get(), bytes) != 0) return failed(errno, path);  // it was larger before
  slots_.resize(count);
  const size_t largest = kPage + options_.shape.part_stride();
  reader_ = std::make_unique<FileReader>(file_.get(), largest);
  if (!reader_->valid()) {
    return absl::ResourceExhaustedError("no memory or threads for reading");
  }
  return absl::OkStatus();
}

absl::Status DiskTier::scan() {
  std::vector<FileRead> reads(slots_.size());
  for (uint32_t i = 0; i < slots_.size(); ++i) reads[i] = {offset(i), kPage};
  reader_->read(reads, [this](size_t number, std::span<const std::byte> bytes) {
    RecordHeader header;
    if (bytes.size() < sizeof(header)) return;
    std::memcpy(&header, bytes.data(), sizeof(header));
    if (!is_header(header, options_.shape)) return;
    const std::lock_guard lock(mutex_);
    const auto [it, first] = index_.try_emplace(header.key, static_cast<uint32_t>(number));
    if (!first) {  // the older of two is not this record any more
      if (slots_[it->second].sequence > header.sequence) return;
      slots_[it->second].key.reset();
      it->second = static_cast<uint32_t>(number);
    }
    slots_[number].key = header.key;
    slots_[number].sequence = header.sequence;
    sequence_ = std::max(sequence_, header.sequence);
  });
  std::vector<uint32_t> order(slots_.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [this](uint32_t a, uint32_t b) {
    return (slots_[a].key ? slots_[a].sequence : 0) < (slots_[b].key ? slots_[b].sequence : 0);
  });
  for (uint32_t slot : order) slots_[slot].place = order_.insert(order_.end(), slot);
  return absl::OkStatus();
}

bool DiskTier::contains(const TierKey& key) const {
  const std::lock_guard lock(mutex_);
  return index_.contains(key);
}

void DiskTier::forget(uint32_t slot) {
  Slot& entry = slots_[slot];
  if (entry.key.has_value()) index_.erase(*entry.key);
  entry.key.reset();
}

// The slot that `key` may be written over: no reader finds or reads it. Nothing: all are being
// read, or the key is here.
std::optional<uint32_t> DiskTier::take_slot(const TierKey& key) {
  if (off_ || index_.contains(key)) return std::nullopt;
  for (auto it = order_.begin(); it != order_.end(); ++it) {
    const uint32_t slot = *it;
    if (slots_[slot].pins > 0) continue;
    evicted_ += slots_[slot].key.has_value();
    forget(slot);
    slots_[slot].pins = 1;
    order_.splice(order_.end(), order_, it);
    return slot;
  }
  return std::nullopt;
}

absl::Status DiskTier::put(const TierRecord& record) {
  std::optional<uint32_t> slot;
  {
    const std::lock_guard lock(mutex_);
    slot = take_slot(record.header().key);
    sequence_ = std::max(sequence_, record.header().sequence);
  }
  if (!slot.has_value()) return absl::OkStatus();
  const std::span<const std::byte> bytes = record.bytes();
  ssize_t written = 0;
  do {
    written = pwrite(file_.get(), bytes.data(), bytes.size(), static_cast<off_t>(offset(*slot)));
  } while (written < 0 && errno == EINTR);
  const int error = written < 0 ? errno : ENOSPC;
  const std::lock_guard lock(mutex_);
  slots_[*slot].pins = 0;
  if (written >= 0 && static_cast<size_t>(written) == bytes.size()) {
    slots_[*slot].key = record.header().key;
    slots_[*slot].sequence = record.header().sequence;
    index_.emplace(record.header().key, *slot);
    return absl::OkStatus();
  }
  if (std::exchange(off_, true)) return absl::OkStatus();
  return failed(error, absl::StrCat("the KV tier in ", options_.directory, " is off"));
}

std::optional<DiskTier::Pin> DiskTier::pin(const TierKey& key) {
  const std::lock_guard lock(mutex_);
  const auto it = index_.find(key);
  if (it == index_.end()) return std::nullopt;
  Slot& slot = slots_[it->second];
  ++slot.pins;
  order_.splice(order_.end(), order_, slot.place);
  Pin pin{.slot = it->second, .header = {}};
  pin.header.key = key;
  return pin;
}

void DiskTier::unpin(const Pin& pin) {
  const std::lock_guard lock(mutex_);
  --slots_[pin.slot].pins;
}

// The header lies before part 0 and is read with it; it is kept for the other parts.
void DiskTier::read(std::span<Pin* const> pins, uint32_t part, const Done& done) {
  const TierShape& shape = options_.shape;
  std::vector<FileRead> reads;
  for (const Pin* pin : pins) {
    reads.push_back({offset(pin->slot) + read_offset(shape, part), read_bytes(shape, part)});
  }
  reader_->read(reads, [&](size_t number, std::span<const std::byte> bytes) {
    Pin& pin = *pins[number];
    const auto meant = checked_part(bytes, shape, part, &pin.header);
    if (!meant.empty()) return done(number, meant);
    {
      const std::lock_guard lock(mutex_);
      ++corrupt_;
      forget(pin.slot);
    }
    done(number, {});
  });
}

uint64_t DiskTier::last_sequence() const {
  const std::lock_guard lock(mutex_);
  return sequence_;
}

size_t DiskTier::records() const {
  const std::lock_guard lock(mutex_);
  return index_.size();
}

uint64_t DiskTier::evicted() const {
  const std::lock_guard lock(mutex_);
  return evicted_;
}

uint64_t DiskTier::corrupt() const {
  const std::lock_guard lock(mutex_);
  return corrupt_;
}

std::string DiskTier::explain() const {
  return absl::StrCat(slots_.size(), " records of ", options_.shape.record_bytes(), " bytes in ",
                      options_.directory, direct_ ? "" : "; this file system has no O_DIRECT");
}

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
