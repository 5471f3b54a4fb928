// A thread that runs a worker's progress(), sleeps when there is nothing to do, and stands back
// while another thread helps (Worker::help()) every few microseconds.
#pragma once

#include <atomic>
#include <thread>

#include "transport/clock.h"
#include "transport/worker.h"

namespace baton {

class ProgressThread {
 public:
  struct Options {
    Time spin = std::chrono::microseconds(20);  // keep polling this long after the last event
    int cpu = -1;                               // pin to this core; -1: do not
  };
  // Throws std::system_error, as std::thread does, where no thread can be had.
  explicit ProgressThread(Worker& worker) : ProgressThread(worker, Options()) {}
  ProgressThread(Worker& worker, Options options);
  ~ProgressThread();  // stops and joins

 private:
  void run();
  Worker& worker_;
  const Options options_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace baton
