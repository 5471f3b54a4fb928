// Where agents leave their metadata for others to find by name: etcd, an HTTP server, or a folder.
// What is left there is bytes to a store; who may be believed is decided by who reads them
// (kvtransfer/metadata/agent_metadata.h).
//
// A store holds a lease: what it has put is there while the lease is renewed, and taken to be gone
// when its process has been dead for as long as the lease lasts. One key belongs to one lease.
//
// Threads: calls block for as long as a server takes, 5 s at most each, and come from one thread at
// a time; stop() may come from any. The watch has a thread of its own.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace baton::kvtransfer {

inline constexpr std::chrono::milliseconds kMinMetadataLease{1000};
// What is kept under one key at most.
inline constexpr size_t kMaxStoredMetadata = 16 << 20;

class MetadataStore {
 public:
  // Which key has changed; "": perhaps any. Called by the watch's thread.
  using Changed = std::function<void(std::string_view key)>;

  // What was put stays until its lease has run out: remove() it first.
  virtual ~MetadataStore() = default;

  // AlreadyExists: the key is another's, whose lease lives. Unavailable: the store does not answer.
  virtual absl::Status put(const std::string& key, std::string_view bytes) = 0;
  // Removes our entry; no error if there is none.
  virtual absl::Status remove(const std::string& key) = 0;
  // Renews the lease. NotFound: it has run out, or what was put is not there any more: put it
  // again. AlreadyExists: another has a key of ours now.
  virtual absl::Status renew() = 0;
  // NotFound: no agent has put anything there whose lease lives.
  virtual absl::StatusOr<std::string> get(const std::string& key) = 0;
  // Says from now on what changes. False: this kind of store cannot.
  virtual bool watch(Changed changed) = 0;
  // Whether the watch sees every change now.
  virtual bool watching() const = 0;
  // Ends the call under way; those that come later fail with Cancelled.
  virtual void stop() = 0;
  // For people.
  virtual std::string name() const = 0;
};

// By the kind of URL:
//   etcd://HOST:PORT[,HOST:PORT...][/PREFIX]   etcd 3.4 or later, by its JSON gateway
//   http://HOST[:PORT][/PATH]                  GET, PUT and DELETE of PATH/KEY
//   file:///FOLDER                             a folder that is there, and that all agents see
// Nothing is asked of a server yet. InvalidArgument: no such URL, or a lease below
// kMinMetadataLease. Of a folder, what FileStore::check() says.
absl::StatusOr<std::unique_ptr<MetadataStore>> make_metadata_store(std::string_view url,
                                                                   std::chrono::milliseconds lease);

// A name as part of a key, of an URL and of a file's name: what is not a letter, a digit, '-' or
// '_' becomes =XX. A label follows a dot.
std::string metadata_key(std::string_view agent, std::string_view label = {});

}  // namespace baton::kvtransfer
