// etcd as a store, by the JSON gateway that it serves beside gRPC since 3.4. Its leases, its
// transactions (a key is taken only where it is not there) and its watch do the work.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kvtransfer/metadata/http_client.h"
#include "kvtransfer/metadata/metadata_store.h"

namespace baton::kvtransfer {

class EtcdStore : public MetadataStore {
 public:
  using Endpoints = std::vector<std::pair<std::string, std::string>>;  // host and port
  EtcdStore(Endpoints endpoints, std::string prefix, std::chrono::milliseconds lease);
  ~EtcdStore() override;

  absl::Status put(const std::string& key, std::string_view bytes) override;
  absl::Status remove(const std::string& key) override;
  absl::Status renew() override;
  absl::StatusOr<std::string> get(const std::string& key) override;
  bool watch(Changed changed) override;
  bool watching() const override { return watching_; }
  void stop() override;
  std::string name() const override;

 private:
  // One question, to whichever endpoint answers.
  absl::StatusOr<std::string> ask(const std::string& what, const std::string& body);
  absl::Status grant();
  void watch_on();
  bool watched(std::string_view line);

  const Endpoints endpoints_;
  const std::string prefix_;
  const std::chrono::milliseconds lease_length_;
  std::vector<std::unique_ptr<HttpClient>> clients_;
  std::atomic<size_t> endpoint_{0};  // which one answers
  std::string lease_;                // its id; "": none

  Changed changed_;
  std::vector<std::unique_ptr<HttpClient>> watchers_;  // by endpoint
  std::atomic<bool> watching_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;
  std::thread watch_thread_;
};

}  // namespace baton::kvtransfer
