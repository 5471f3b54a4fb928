// Stores of metadata for tests: a folder, an HTTP server of this process, and a real etcd in a
// process of its own.
#pragma once

#include "tests/test.h"

namespace baton::kvtransfer {

class MetadataServer {
 public:
  virtual ~MetadataServer() = default;
  virtual std::string url() const = 0;
  // Ends it without a word, and starts it again with what it had. A folder cannot.
  virtual void kill() = 0;
  virtual void start() = 0;
};

// "file", "http" or "etcd". Null, with the reason, where it cannot be had.
std::unique_ptr<MetadataServer> make_metadata_server(const std::string& kind, std::string& why);

}  // namespace baton::kvtransfer
