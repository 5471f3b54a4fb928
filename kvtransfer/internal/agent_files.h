// Files as an agent's memory: the ranges that are registered, and the threads that read and write
// them for its transfers (agent_file_transfer.h).
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kvtransfer/agent.h"
#include "kvtransfer/internal/agent_ranges.h"
#include "transport/base/unique_fd.h"

namespace baton::kvtransfer {

class AgentFileTransfer;

// What an application has open, by a descriptor of our own: it may close its, or open another file
// under that number, and no byte goes astray.
struct OpenFile {
  base::UniqueFd fd;
  uint64_t number = 0;  // the application's descriptor
  dev_t device = 0;
  ino_t inode = 0;
  int flags = 0;  // it was opened with
};

// One registered range.
struct FileRegion {
  std::shared_ptr<const OpenFile> file;
  uint64_t offset = 0;
  uint64_t id = 0;  // another one for each registration
};

class AgentFiles {
 public:
  explicit AgentFiles(Worker& worker);  // whose sleepers are woken when a transfer has ended
  ~AgentFiles();
  AgentFiles(const AgentFiles&) = delete;
  AgentFiles& operator=(const AgentFiles&) = delete;

  // Aborts what runs, and waits for its end. No transfer starts afterwards.
  void stop();

  // All or none; as Agent::register_memory() and deregister_memory() say. The agent's lock is held
  // for these five.
  absl::Status add(absl::Span<const Descriptor> list);
  absl::Status remove(absl::Span<const Descriptor> list);
  std::shared_ptr<const AgentRanges<FileRegion>> ranges() const { return ranges_; }
  bool has(absl::Span<const Descriptor> list) const;
  bool holds(const FileRegion& region) const;

  // Whether a transfer that runs moves bytes of it.
  bool uses(const MemoryRegion& memory) const;

 private:
  friend class AgentFileTransfer;
  void replace(AgentRanges<FileRegion> by);
  absl::Status start(const std::shared_ptr<AgentFileTransfer>& transfer);  // locked
  void work();
  // Tells waiters what has ended: not under the lock, which they take to look.
  void unlock_and_wake(std::unique_lock<std::mutex>& lock);

  static constexpr size_t kThreads = 4;

  Worker& worker_;
  std::shared_ptr<const AgentRanges<FileRegion>> ranges_;  // replaced, never changed
  std::vector<uint64_t> ids_;                              // theirs, in order
  uint64_t next_id_ = 0;

  mutable std::mutex mutex_;  // of what follows, and of all transfers' states
  std::condition_variable work_;
  bool stop_ = false;
  bool ended_ = false;  // a transfer has, and no waiter was woken yet
  std::vector<std::shared_ptr<AgentFileTransfer>> running_;
  std::deque<std::shared_ptr<AgentFileTransfer>> queue_;  // those with jobs left, in turns
  std::vector<std::thread> threads_;
};

}  // namespace baton::kvtransfer
