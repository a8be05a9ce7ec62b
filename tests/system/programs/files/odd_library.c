/* A library whose constructor makes a file, before the program begins: ARGV[1]/constructor.of.RANK,
 * if row "constructor" is played. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int constructor_file = -1;

__attribute__((constructor)) static void begin(int argc, char **argv)
{
    char name[600];
    if (argc < 4 || !strstr(argv[3], "constructor"))
        return;
    const char *rank = getenv("PMI_RANK");
    snprintf(name, sizeof name, "%s/constructor.of.%s", argv[1], rank ? rank : "0");
    constructor_file = open(name, O_RDWR | O_CREAT | O_TRUNC, 0644);
    if (write(constructor_file, "-1\n", 3) != 3)
        abort();
}
