/* Makes a program believe that this x86 processor ends with AVX2: no AVX-512, VNNI or AMX.
 *
 *     cc -O2 -shared -fPIC -o hide_vnni.so tools/hide_vnni.c
 *     LD_PRELOAD=$PWD/hide_vnni.so COMMAND
 *
 * Linux can make the instruction CPUID fault (arch_prctl(2), ARCH_SET_CPUID; "cpuid_fault" in
 * /proc/cpuinfo). This library answers the fault with what the processor says, without some features. So
 * libraries choose the kernels that they have for older processors, and run at full speed.
 */
#define _GNU_SOURCE
#include <asm/prctl.h>
#include <cpuid.h>
#include <dlfcn.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define BIT(n) (1u << (n))

typedef int set_action(int, const struct sigaction *, struct sigaction *);

static struct sigaction theirs; /* handler of the program for other faults */

static set_action *real_sigaction(void) { return (set_action *)dlsym(RTLD_NEXT, "sigaction"); }

static int set_cpuid(int allowed) { return (int)syscall(SYS_arch_prctl, ARCH_SET_CPUID, allowed); }

/* Intel's manual, volume 2A, CPUID, leaf 7. */
static void hide(unsigned leaf, unsigned part, unsigned *a, unsigned *b, unsigned *c, unsigned *d) {
  if (leaf == 7 && part == 0) {
    *b &= ~(BIT(16) | BIT(17) | BIT(21) | BIT(26) | BIT(27) | BIT(28) | BIT(30) | BIT(31));
    *c &= ~(BIT(1) | BIT(6) | BIT(11) | BIT(12) | BIT(14)); /* VBMI, VNNI, BITALG, VPOPCNTDQ */
    *d &= ~(BIT(2) | BIT(3) | BIT(8) | BIT(22) | BIT(23) | BIT(24) | BIT(25)); /* FP16, AMX */
  }
  if (leaf == 7 && part == 1) {
    *a &= ~(BIT(4) | BIT(5) | BIT(21) | BIT(23)); /* AVX-VNNI, AVX512_BF16, AMX-FP16, AVX-IFMA */
    *d &= ~(BIT(4) | BIT(5) | BIT(10) | BIT(19)); /* AVX-VNNI-INT8, NE-CONVERT, VNNI-INT16, AVX10 */
  }
}

static void answer(greg_t *registers) {
  unsigned leaf = (unsigned)registers[REG_RAX], part = (unsigned)registers[REG_RCX], a, b, c, d;
  set_cpuid(1);
  __cpuid_count(leaf, part, a, b, c, d);
  set_cpuid(0);
  hide(leaf, part, &a, &b, &c, &d);
  registers[REG_RAX] = a, registers[REG_RBX] = b, registers[REG_RCX] = c, registers[REG_RDX] = d;
  registers[REG_RIP] += 2;
}

static void fault(int number, siginfo_t *info, void *context) {
  greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
  const unsigned char *code = (const unsigned char *)registers[REG_RIP];
  if (info->si_code == SI_KERNEL && code[0] == 0x0f && code[1] == 0xa2) {
    answer(registers);
  } else if (theirs.sa_flags & SA_SIGINFO) {
    theirs.sa_sigaction(number, info, context);
  } else if (theirs.sa_handler != SIG_DFL && theirs.sa_handler != SIG_IGN) {
    theirs.sa_handler(number);
  } else {
    real_sigaction()(number, &theirs, NULL);
    raise(number);
  }
}

/* Programs that set a handler of their own (Python's faulthandler, gcc) get it, behind this one. */
int sigaction(int number, const struct sigaction *wanted, struct sigaction *before) {
  if (number != SIGSEGV) return real_sigaction()(number, wanted, before);
  if (before) *before = theirs;
  if (wanted) theirs = *wanted;
  return 0;
}

sighandler_t signal(int number, sighandler_t handler) {
  struct sigaction wanted, before;
  memset(&wanted, 0, sizeof wanted);
  wanted.sa_handler = handler;
  wanted.sa_flags = SA_RESTART;
  return sigaction(number, &wanted, &before) ? SIG_ERR : before.sa_handler;
}

__attribute__((constructor)) static void start(void) {
  static const char failed[] = "hide_vnni: this processor cannot hide its features\n";
  struct sigaction ours;
  memset(&ours, 0, sizeof ours);
  ours.sa_sigaction = fault;
  ours.sa_flags = SA_SIGINFO | SA_NODEFER;
  real_sigaction()(SIGSEGV, &ours, &theirs);
  if (set_cpuid(0)) {
    (void)!write(STDERR_FILENO, failed, sizeof failed - 1);
    _exit(125);
  }
}
