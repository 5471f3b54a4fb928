// Workers in processes of their own, for tests that kill, stop and misconfigure them.
#pragma once

#include "tests/std.h"
#include "transport/worker.h"

namespace baton {

inline constexpr size_t kChildBytes = 4 << 20;

// The worker options of both sides: only this provider.
WorkerOptions process_options(const std::string& provider, const std::string& name,
                              const std::string& secret = "a secret of the process tests");

// A child process that runs a worker with kChildBytes of memory, which it fills with `seed`, until
// it is killed. It is this program, started anew: nothing of the parent's workers lives on in it.
class Child {
 public:
  // `port`: that it listens on; 0: any.
  Child(const std::string& provider, const std::string& name, uint8_t seed,
        const std::string& secret = "a secret of the process tests", uint16_t port = 0);
  ~Child();  // kills it
  // To be called first thing in main(): in a child it does not return.
  static void serve_if_asked(int argc, char** argv);
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  bool started() const { return !address_.empty(); }
  const std::string& address() const { return address_; }
  const RemoteRegion& region() const { return region_; }
  void signal(int number) const;
  void kill();  // SIGKILL, and waits for it

 private:
  pid_t pid_ = -1;
  std::string address_;
  RemoteRegion region_;
};

}  // namespace baton
