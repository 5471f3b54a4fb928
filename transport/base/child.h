// Forking a child that does not outlive its parent.
#pragma once

#include <sys/prctl.h>
#include <sys/types.h>
#include <unistd.h>

#include <csignal>

namespace baton::base {

// As fork(), and the kernel kills the child, and what it executes, once the thread that forked it
// has ended.
inline pid_t fork_child() {
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child != 0) return child;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);  // it ended before that
  return 0;
}

}  // namespace baton::base
