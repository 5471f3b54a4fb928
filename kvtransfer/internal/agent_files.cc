// Registered files, and the threads that take jobs of transfers in turns.
#include "kvtransfer/internal/agent_files.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <map>
#include <optional>
#include <system_error>
#include <tuple>
#include <utility>

#include "absl/strings/str_format.h"
#include "kvtransfer/internal/agent_file_transfer.h"
#include "transport/base/limits/refusals.h"

namespace baton::kvtransfer {
namespace {

using Ranges = AgentRanges<FileRegion>;

constexpr uint64_t kEndOfFiles = uint64_t{1} << 63;

// What tells one open file from another.
using Identity = std::tuple<uint64_t, dev_t, ino_t, int>;
Identity identity(const OpenFile& file) {
  return {file.number, file.device, file.inode, file.flags};
}

// What `number` has open now.
absl::StatusOr<std::shared_ptr<OpenFile>> open_file(uint64_t number) {
  auto file = std::make_shared<OpenFile>();
  file->number = number;
  const int fd = number <= INT32_MAX ? static_cast<int>(number) : -1;
  struct stat seen {};
  if (fstat(fd, &seen) != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "file descriptor %u: %s; a FILE descriptor's device is the number of an open file", number,
        strerror(errno)));
  }
  file->device = seen.st_dev;
  file->inode = seen.st_ino;
  file->flags = fcntl(fd, F_GETFL);
  return file;
}

absl::Status not_registered(const Descriptor& where) {
  return absl::NotFoundError(absl::StrFormat(
      "%u bytes at %u of file descriptor %u are not registered: name them as they were registered",
      where.bytes, where.address, where.device));
}

}  // namespace

AgentFiles::AgentFiles(Worker& worker) : worker_(worker), ranges_(std::make_shared<Ranges>()) {}

AgentFiles::~AgentFiles() { stop(); }

void AgentFiles::stop() {
  {
    std::unique_lock lock(mutex_);
    stop_ = true;
    for (const auto& transfer : std::vector(running_)) transfer->stop();
    queue_.clear();
    unlock_and_wake(lock);
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

absl::Status AgentFiles::add(absl::Span<const Descriptor> list) {
  // Ranges of one file share a descriptor.
  std::map<Identity, std::shared_ptr<const OpenFile>> known;
  for (const Ranges::Range& range : *ranges_) {
    known.emplace(identity(*range.region.file), range.region.file);
  }
  std::vector<Ranges::Range> added;
  for (const Descriptor& where : list) {
    absl::StatusOr<std::shared_ptr<OpenFile>> opened = open_file(where.device);
    if (!opened.ok()) return opened.status();
    if (where.bytes == 0 || where.address >= kEndOfFiles ||
        where.bytes > kEndOfFiles - where.address) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%u bytes at %u cannot be part of a file", where.bytes, where.address));
    }
    std::shared_ptr<const OpenFile>& file = known[identity(**opened)];
    if (file == nullptr) {
      (*opened)->fd.reset(fcntl(static_cast<int>(where.device), F_DUPFD_CLOEXEC, 0));
      if (!(*opened)->fd.valid()) {
        return absl::ResourceExhaustedError(base::refusal(
            absl::StrFormat("file descriptor %u cannot be kept open", where.device), errno));
      }
      file = *std::move(opened);
    }
    added.push_back({where, {file, where.address, ++next_id_}});
  }
  replace(ranges_->with(std::move(added)));
  return absl::OkStatus();
}

absl::Status AgentFiles::remove(absl::Span<const Descriptor> list) {
  std::vector<size_t> places = ranges_->find_all(list);
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < list.size(); ++i) {
    if (places[i] == Ranges::kNone) return not_registered(list[i]);
    for (const auto& transfer : running_) {
      if (!transfer->uses((*ranges_)[places[i]].region)) continue;
      return absl::FailedPreconditionError(absl::StrFormat(
          "a transfer uses file descriptor %u: release the transfer first", list[i].device));
    }
  }
  replace(ranges_->without(std::move(places)));
  return absl::OkStatus();
}

void AgentFiles::replace(Ranges by) {
  ids_.clear();
  for (const Ranges::Range& range : by) ids_.push_back(range.region.id);
  std::sort(ids_.begin(), ids_.end());
  ranges_ = std::make_shared<const Ranges>(std::move(by));
}

bool AgentFiles::has(absl::Span<const Descriptor> list) const {
  return std::all_of(list.begin(), list.end(), [&](const Descriptor& where) {
    return ranges_->cover(where.address, where.bytes, where.device, nullptr) != nullptr;
  });
}

bool AgentFiles::holds(const FileRegion& region) const {
  return std::binary_search(ids_.begin(), ids_.end(), region.id);
}

bool AgentFiles::uses(const MemoryRegion& memory) const {
  const std::lock_guard lock(mutex_);
  return std::any_of(running_.begin(), running_.end(),
                     [&](const auto& transfer) { return transfer->uses(memory); });
}

absl::Status AgentFiles::start(const std::shared_ptr<AgentFileTransfer>& transfer) {
  if (stop_) return absl::FailedPreconditionError("the agent is being destroyed");
  while (threads_.size() < kThreads) {
    try {
      threads_.emplace_back([this] { work(); });
    } catch (const std::system_error& none) {
      if (!threads_.empty()) break;
      return absl::ResourceExhaustedError(
          absl::StrFormat("no thread to read and write files: %s; raise `ulimit -u`", none.what()));
    }
  }
  running_.push_back(transfer);
  queue_.push_back(transfer);
  work_.notify_all();
  return absl::OkStatus();
}

void AgentFiles::work() {
  // Past the process's limit of a file's size a write is an error here, and no end of the process.
  sigset_t too_large;
  sigemptyset(&too_large);
  sigaddset(&too_large, SIGXFSZ);
  pthread_sigmask(SIG_BLOCK, &too_large, nullptr);
  std::unique_lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [this] { return stop_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const std::shared_ptr<AgentFileTransfer> transfer = std::move(queue_.front());
    queue_.pop_front();
    const std::optional<FileJob> job = transfer->take_job();
    if (!job) continue;
    if (transfer->has_jobs()) {
      queue_.push_back(transfer);
      work_.notify_one();
    }
    lock.unlock();
    const absl::Status status = transfer->run(*job);
    lock.lock();
    transfer->job_done(status);
    unlock_and_wake(lock);
    lock.lock();
  }
}

void AgentFiles::unlock_and_wake(std::unique_lock<std::mutex>& lock) {
  const bool ended = std::exchange(ended_, false);
  lock.unlock();
  if (ended) worker_.wake();
}

}  // namespace baton::kvtransfer
