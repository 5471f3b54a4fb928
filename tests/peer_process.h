// A program that a test starts, listens to and kills.
#pragma once

#include <spawn.h>

#include "tests/test.h"

extern char** environ;

namespace baton {

class PeerProcess {
 public:
  explicit PeerProcess(const char* program, const char* argument = nullptr) {
    int ends[2];
    EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], 1);
    char* const arguments[] = {const_cast<char*>(program), const_cast<char*>(argument), nullptr};
    EXPECT_EQ(posix_spawn(&pid_, program, &actions, nullptr, arguments, environ), 0);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    out_ = fdopen(ends[0], "r");
  }
  ~PeerProcess() {
    kill_it();
    fclose(out_);
  }
  PeerProcess(const PeerProcess&) = delete;
  PeerProcess& operator=(const PeerProcess&) = delete;

  std::string line() {
    char text[4096] = "";
    if (fgets(text, sizeof text, out_) == nullptr) return "";
    text[strcspn(text, "\n")] = 0;
    return text;
  }
  // All of its threads stand when this returns: a busy machine lets some go on after the signal.
  void stop() const {
    kill(pid_, SIGSTOP);
    waitpid(pid_, nullptr, WUNTRACED);
  }
  void go_on() const { kill(pid_, SIGCONT); }
  void kill_it() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

 private:
  pid_t pid_ = -1;
  FILE* out_ = nullptr;
};

}  // namespace baton
