// A folder as a store: a file for each key, replaced by a rename, and beside it a file that its
// owner holds locked. The kernel opens the lock of a process that died: that is the lease. A child
// that was forked lets go of its parent's locks at once, so a name is free when its owner is dead,
// whoever it has forked. One that was made by clone() alone, past the C library, holds them too.
#pragma once

#include <map>
#include <string>

#include "kvtransfer/metadata/metadata_store.h"
#include "transport/base/unique_fd.h"

namespace baton::kvtransfer {

class FileStore : public MetadataStore {
 public:
  explicit FileStore(std::string folder);
  // NotFound: there is no such folder. FailedPrecondition: it is no folder, or this process may not
  // write there. A folder that goes later is Unavailable in the calls.
  static absl::Status check(const std::string& folder);
  ~FileStore() override;
  FileStore(const FileStore&) = delete;
  FileStore& operator=(const FileStore&) = delete;

  absl::Status put(const std::string& key, std::string_view bytes) override;
  absl::Status remove(const std::string& key) override;
  absl::Status renew() override;
  absl::StatusOr<std::string> get(const std::string& key) override;
  bool watch(Changed) override { return false; }
  bool watching() const override { return false; }
  void stop() override {}
  std::string name() const override { return "file://" + folder_; }

 private:
  std::string file(const std::string& key) const { return folder_ + "/" + key + ".agent"; }
  std::string lock(const std::string& key) const { return folder_ + "/" + key + ".lock"; }
  absl::Status take(const std::string& key);

  const std::string folder_;
  // By key: its lock. Changed under the lock of all stores, which fork() takes.
  std::map<std::string, base::UniqueFd> ours_;
};

}  // namespace baton::kvtransfer
